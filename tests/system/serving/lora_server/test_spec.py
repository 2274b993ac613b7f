"""Specification of the roles, and the errors where they disagree."""

import dataclasses

import pytest
from support.cases import lora_server_cases as cases

from serving.lora_server.spec import base_digest, design
from serving.lora_server.transport.compatibility import mismatch


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("spec"), 0)[0]


@pytest.mark.parametrize(("placement", "ranks"), cases.PLACEMENTS.items())
def test_a_design_has_a_shard_per_rank(model, placement, ranks):
    made = design(cases.make_spec(model, placement))
    assert made.layout.num_ranks == ranks
    assert made.terms.shapes.layers == 2
    assert [site.d_outs for site in made.terms.shapes.sites] == [(48, 48), (32,)]
    assert made.sizes.max_rows == made.terms.shapes.max_rows


def test_rows_in_8_bits_are_nearly_a_quarter_of_those_in_float32(model):
    wide, narrow = (
        design(cases.make_spec(model, "ep2-pp1", lora_dtype=kept)) for kept in ("auto", "int8")
    )
    assert narrow.sizes.int8_rows
    assert not wide.sizes.int8_rows
    # Rows of 32 and 48 values, of which float32 takes 128 and 192 bytes.
    assert 48 / 128 > narrow.slot_bytes(0) / wide.slot_bytes(0) > 64 / 192
    facts = (made.terms.facts(0) for made in (wide, narrow))
    assert "dtype of adapters: the server has auto, the instance int8" in (mismatch(*facts) or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": "ep3-pp1", "ranks": 3}, r"4 experts cannot be split evenly .* 1, 2, 4"),
        ({"placement": "ep2-pp1", "ranks": 4}, "choose from ep1-pp4, ep2-pp2, ep4-pp1"),
        ({"placement": "ep1-pp4", "ranks": 4}, "2 layers cannot fill pp=4"),
        ({"num_adapters": 0}, "adapters must be a whole number from 1"),
    ],
)
def test_what_is_impossible_says_what_to_change(model, changes, message):
    with pytest.raises(ValueError, match=message):
        design(cases.make_spec(model, **{"placement": "ep1-pp1"} | changes))


def test_a_step_must_fit_into_a_message_and_a_rank_into_the_slots(model):
    made = design(cases.make_spec(model, "ep1-pp1", max_rows=15, max_rank=8))
    made.require_rows(7)
    with pytest.raises(ValueError, match=r"16 .* takes 15 .* lower max_num_batched_tokens to 7"):
        made.require_rows(8)
    made.require_rank(8)
    with pytest.raises(ValueError, match="same max_lora_rank"):
        made.require_rank(9)


def test_another_base_model_is_another_digest(model, tmp_path):
    cases.write_files(tmp_path, 0)
    assert base_digest(model) == base_digest(str(tmp_path / "model"))
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert base_digest(model) != base_digest(str(tmp_path / "model"))
    ours = design(cases.make_spec(model, "ep2-pp1")).terms
    theirs = design(cases.make_spec(str(tmp_path / "model"), "ep2-pp1")).terms
    said = mismatch(ours.facts(0), theirs.facts(0))
    assert said is not None
    assert "base model" in said
    assert "start both sides with the same model" in said


def test_files_of_other_sizes_are_another_base(model, tmp_path):
    cases.tiny_checkpoint.write_model(
        tmp_path / "model", dataclasses.replace(cases.SHAPE, vocab=261)
    )
    assert base_digest(model) != base_digest(str(tmp_path / "model"))
