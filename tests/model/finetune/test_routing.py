"""The routing that is collected is what the router does with each real token, once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.finetune_cases import CONFIG, RECORDS, make_folder

from lora_jax.config import from_hf
from lora_jax.finetune.documents import Document, read_format
from lora_jax.finetune.routing import collect_routing, first_tokens
from lora_jax.models import build, load
from lora_jax.ops.choose_experts import choose_experts

LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0)


def test_every_token_but_the_last_of_each_document_is_counted(folder):
    model, config = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")
    totals = collect_routing(model, documents, LENGTH)
    assert list(totals) == [0, 1]
    tokens = sum(len(document.tokens) - 1 for document in documents)
    for total in totals.values():
        assert total.tokens == tokens
        assert total.choices.sum() == config.moe.top_k * tokens
        # The weights of a token's experts sum to 1 in this model.
        np.testing.assert_allclose(total.gates.sum(), tokens, rtol=1e-5)
        assert total.scores("gate").std() > 0.01


def test_the_first_layer_routes_by_its_router(folder):
    """With attention silenced, a token's first routing depends on its embedding alone."""
    model, config = load(folder, dtype="float32")
    first = model.layers[0]
    first.attn.o_proj.weight[...] = jnp.zeros_like(first.attn.o_proj.weight[...])
    tokens = tuple(np.random.default_rng(0).integers(3, 250, 40).tolist())
    total = collect_routing(model, [Document(tokens, 0)], LENGTH)[0]
    hidden = first.post_norm(model.embed(jnp.asarray(tokens[:-1], jnp.int32)))
    logits = jnp.einsum("ti,oi->to", hidden, first.mlp.router.weight[...])
    gates, ids = (np.asarray(x) for x in choose_experts(logits, config.moe))
    want = np.zeros(config.moe.num_experts)
    np.add.at(want, ids, gates)
    np.testing.assert_allclose(total.gates, want, rtol=1e-4)
    np.testing.assert_array_equal(total.choices, np.bincount(ids.ravel(), minlength=len(want)))


@pytest.mark.long
def test_the_factor_on_all_gates_is_left_out():
    plain = from_hf(CONFIG)
    scaled = dataclasses.replace(plain, moe=dataclasses.replace(plain.moe, weight_scale=2.5))
    text = [Document(tuple(range(20)), 0)]
    first, second = (collect_routing(build(c), text, LENGTH)[0] for c in (plain, scaled))
    assert first.gates.sum() == pytest.approx(first.tokens)
    np.testing.assert_allclose(first.gates, second.gates, rtol=1e-5)


def test_documents_are_taken_until_there_are_enough_tokens():
    documents = [Document((1,) * n, 0) for n in (5, 3, 9)]
    assert first_tokens(documents, 5) == documents[:1]
    assert first_tokens(documents, 6) == documents[:2]
    assert first_tokens(documents, 100) == documents


def test_a_model_without_experts_is_refused():
    dense = {k: v for k, v in CONFIG.items() if "expert" not in k} | {"model_type": "llama"}
    with pytest.raises(ValueError, match="no experts"):
        collect_routing(build(from_hf(dense)), [Document((1, 2, 3), 0)], LENGTH)
