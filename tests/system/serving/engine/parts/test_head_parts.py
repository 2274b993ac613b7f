"""The modules with a task head, which a model knows only where there are any."""

from types import SimpleNamespace

from support.cases import adapter_cases as cases

from lora_jax.adapters.task_head import SCORE
from serving.engine.parts.head_parts import take_heads


def test_a_model_knows_of_heads_only_where_there_are_any():
    catalogue = cases.llama()
    names = catalogue.module_names
    model = SimpleNamespace(module_names=names)
    assert take_heads(model, catalogue, 16, 0) is catalogue
    assert model.module_names == names
    headed = take_heads(model, catalogue, 16, 5)
    assert headed.modules[SCORE].d_in == 16
    assert model.module_names == headed.module_names == tuple(sorted((*names, SCORE)))
