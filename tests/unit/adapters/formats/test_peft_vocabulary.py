"""Trained tokens and saved embeddings and heads of PEFT folders: what is read, what is refused."""

import dataclasses

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.vocabulary import PARTS, saved_name, tokens_name, with_vocabulary

PLAIN = cases.llama()
HIDDEN, VOCAB = PLAIN.modules["lm_head"].d_in, PLAIN.modules["lm_head"].d_out
UNTIED = with_vocabulary(PLAIN, tied=False, most_tokens=3, most_saved=2)
TIED = with_vocabulary(PLAIN, tied=True, most_tokens=3, most_saved=2)
EMBEDDING, HEAD = PARTS
ROWS = np.arange(2 * HIDDEN, dtype="f4").reshape(2, HIDDEN)
WHOLE = np.arange(VOCAB * HIDDEN, dtype="f4").reshape(VOCAB, HIDDEN)
DELTA = "token_adapter.trainable_tokens_delta"
OF_TOKENS = {f"model.embed_tokens.{DELTA}": ROWS}
OF_SAVED = {"model.embed_tokens.weight": WHOLE}
TRAINED = {"trainable_token_indices": [5, 2]}
SAVED = {"modules_to_save": ["embed_tokens"]}


def read(folder, config, tensors, catalogue=UNTIED, at="model.layers.0.self_attn.q_proj"):
    d_out = VOCAB if at == HEAD else 16
    lora = {f"{at}.lora_A.weight": np.ones((2, 16), "f4")}
    lora[f"{at}.lora_B.weight"] = np.ones((d_out, 2), "f4")
    cases.write_adapter(folder, lora | tensors, {"r": 2, "lora_alpha": 6, **config})
    return peft_format.read(folder, catalogue)


@pytest.mark.parametrize(("catalogue", "parts"), [(UNTIED, PARTS[:1]), (TIED, PARTS)])
def test_trained_tokens_are_rows_which_a_tied_head_shares(tmp_path, catalogue, parts):
    weights = read(tmp_path / "a", TRAINED, OF_TOKENS, catalogue)
    assert weights.token_ids == dict.fromkeys(parts, (5, 2))
    for part in parts:
        site = weights.sites[tokens_name(part), 0]
        np.testing.assert_array_equal(site.a[0], ROWS)
        if part == HEAD:
            np.testing.assert_array_equal(site.b[0], np.eye(2, 64))
            assert site.a is weights.sites[tokens_name(EMBEDDING), 0].a
    assert weights.report.brings == ("trained tokens (trainable_token_indices)",)
    assert weights.report.max_rank == 2


def test_a_head_may_have_its_own_trained_tokens(tmp_path):
    config = {"trainable_token_indices": {"embed_tokens": [5, 2], "lm_head": [1, 4]}}
    tensors = OF_TOKENS | {f"lm_head.{DELTA}": ROWS + 1}
    weights = read(tmp_path / "a", config, tensors)
    assert weights.token_ids == {EMBEDDING: (5, 2), HEAD: (1, 4)}
    np.testing.assert_array_equal(weights.sites[tokens_name(HEAD), 0].a[0], ROWS + 1)


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_saved_embedding_changes_a_tied_head_only_where_peft_ties_it(tmp_path, has_copy):
    tied = SAVED | {"ensure_weight_tying": True}
    copy = {"lm_head.weight": WHOLE} if has_copy else {}
    weights = read(tmp_path / "a", tied, OF_SAVED | copy, TIED)
    both = [weights.sites[saved_name(part), 0] for part in PARTS]
    assert both[0].a is both[1].a is both[1].b  # on the device it is there once
    assert weights.rows_by_width()[VOCAB * HIDDEN] == 1
    np.testing.assert_array_equal(both[0].a.reshape(WHOLE.shape), WHOLE)
    for catalogue, config in ((TIED, SAVED), (UNTIED, tied)):
        alone = read(tmp_path / str(catalogue.tied_head), config, OF_SAVED, catalogue)
        assert (saved_name(HEAD), 0) not in alone.sites
        assert alone.report.brings == ("embed_tokens (modules_to_save)",)


BOUND = dataclasses.replace(PLAIN, only_lora="tensor_parallel_size 2")
WRONG = [
    (TRAINED, {}, UNTIED, "no trained rows of embed_tokens, which trainable_token_indices"),
    ({}, OF_TOKENS, UNTIED, "trained embedding rows are not supported"),
    (TRAINED, OF_TOKENS | OF_SAVED, UNTIED, r"announces no embed_tokens \(modules_to_save\)"),
    (TRAINED | SAVED, OF_TOKENS | OF_SAVED, UNTIED, "embed_tokens has trained tokens, and is"),
    (TRAINED, {f"encoder.embed_tokens.{DELTA}": ROWS}, UNTIED, "has no module encoder.embed_tok"),
    (TRAINED, OF_TOKENS, BOUND, r"takes 0: that does not go with tensor_parallel_size 2\. Start"),
    (TRAINED, OF_TOKENS, PLAIN, "takes 0: start it with max_lora_trainable_tokens of 2 or more"),
    ({"trainable_token_indices": [5, 2, 1]}, OF_TOKENS, UNTIED, r"\(2, 16\); the config and the"),
    ({"trainable_token_indices": [5, 10**6]}, OF_TOKENS, UNTIED, "indices has 1000000; the base"),
    ({"trainable_token_indices": [5, 5]}, OF_TOKENS, UNTIED, "embed_tokens has a token twice"),
    ({"trainable_token_indices": [-1]}, OF_TOKENS, UNTIED, "not a list of token ids"),
    ({"trainable_token_indices": {"wte": [1]}}, {}, UNTIED, 'names "wte"; embed_tokens and lm_h'),
    ({"trainable_token_indices": {"lm_head": [1]}}, {}, TIED, "which is the base's embedding"),
    (SAVED, {}, UNTIED, "no weight of embed_tokens, which modules_to_save announces"),
    (SAVED, OF_SAVED, BOUND, "takes 0: that does not go with tensor_parallel_size 2"),
    (SAVED, OF_SAVED, PLAIN, "the server takes 0: start it with a larger max_lora_modules_to_save"),
    (SAVED, {"model.embed_tokens.weight": WHOLE[:-1]}, UNTIED, "vocabulary of another size"),
    (
        SAVED | {"ensure_weight_tying": True},
        OF_SAVED | {"lm_head.weight": WHOLE + 1},
        TIED,
        "lm_head.weight: it is tied to the embedding, and differs",
    ),
    ({"modules_to_save": ["norm"]}, {}, UNTIED, r'modules_to_save = \["norm"\] is not supported'),
]


@pytest.mark.parametrize(("config", "tensors", "catalogue", "message"), WRONG)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, config, tensors, catalogue, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a", config, tensors, catalogue)


def test_lora_on_a_head_with_rows_of_its_own_is_refused(tmp_path):
    config, tensors = {"modules_to_save": ["lm_head"]}, {"lm_head.weight": WHOLE}
    with pytest.raises(ValueError, match="lm_head has LoRA beside lm_head"):
        read(tmp_path / "a", config, tensors, at=HEAD)
