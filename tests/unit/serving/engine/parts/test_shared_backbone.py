"""An engine over a shared backbone takes its weights from there, and refuses what would copy."""

import os

import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.arena import ImportedArena
from lora_jax.memory.host import HostMemory
from lora_jax.models.shared_weights import load_into_arena
from serving import Engine, Sampling
from serving.api.config import EngineConfig
from serving.engine.parts.shared_backbone import check_backbone, source_of

MODEL = ROOT / "assets" / "tiny-moe"


@pytest.mark.parametrize(
    ("fields", "has_server", "words"),
    [
        ({"tensor_parallel_size": 2}, False, "tensor_parallel_size 2"),
        ({"load_format": "dummy"}, False, "load_format dummy"),
        ({"max_esft_adapters": 3}, False, "max_esft_adapters 3"),
        ({"lora_merge": "auto"}, False, "lora_merge auto"),
        ({"merge_adapter": "law"}, False, "merge_adapter law"),
        ({"max_esft_adapters": 3}, True, "max_esft_adapters 3, lora_server"),
    ],
)
def test_what_does_not_work_together_is_refused_by_name(fields, has_server, words):
    with pytest.raises(ValueError, match=words):
        check_backbone(EngineConfig(str(MODEL), **fields), has_server)


def test_experts_stay_where_they_are():
    config = check_backbone(EngineConfig(str(MODEL)), False)
    assert config.max_esft_adapters == 0


def test_source_is_the_files_without_a_backbone():
    assert not source_of(EngineConfig(str(MODEL)), None).made_up


@pytest.mark.long  # test_agent.py has the same promise between processes
def test_answers_are_those_of_an_engine_of_its_own():
    """Tokens and log-probability bits, with an adapter and without, over imported weights."""
    _, _, arena = load_into_arena(MODEL, HostMemory())
    fds = arena.export()
    backbone = ImportedArena(HostMemory(), arena.manifest, fds)
    for fd in fds:
        os.close(fd)
    small = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8, "max_loras": 1}
    small |= {"structured_outputs": False, "max_esft_adapters": 0, "max_lora_rank": 16}
    adapters = {"law": MODEL / "adapters" / "law"}
    answers = []
    for there in (None, backbone):
        with Engine(MODEL, adapters, backbone=there, **small) as engine:
            if there is not None:
                leaves = engine._loop._parts.runner._step._leaves
                assert all(leaf.unsafe_buffer_pointer() in there.span for leaf in leaves)
            sampling = Sampling(temperature=0, max_tokens=12, logprobs=1)
            outputs = engine.generate(["The court", "The court"], ["law", None], sampling)
            answers.append([[(c.token_ids, c.logprobs) for c in o.outputs] for o in outputs])
    assert answers[0] == answers[1]
