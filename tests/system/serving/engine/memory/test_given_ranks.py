"""The ranks of given adapters, from their configs."""

import json

import pytest

from serving.api.config import EngineConfig
from serving.engine.memory.given_ranks import largest_rank, usual_rank


@pytest.fixture
def write(tmp_path):
    def make(name, text=None, **config):
        (tmp_path / name).mkdir()
        text = json.dumps(config) if text is None else text
        (tmp_path / name / "adapter_config.json").write_text(text)
        return tmp_path / name

    return make


def test_the_largest_rank_is_that_of_a_config_or_of_a_pattern(write):
    plain = write("a", r=4)
    assert largest_rank([plain]) == 4
    assert largest_rank([plain, write("b", r=2, rank_pattern={"q_proj": 16})]) == 16
    assert largest_rank([]) is None


@pytest.mark.parametrize(
    "config",
    [
        {"text": "no json"},
        {"text": "[]"},
        {},
        {"r": "8"},
        {"r": 0},
        {"r": True},
        {"r": 8, "rank_pattern": {"q_proj": None}},
        {"r": 8, "rank_pattern": 3},
        {"r": 8, "use_dora": True},
        {"r": 8, "modules_to_save": ["score"]},
    ],
)
def test_what_says_no_rank_or_takes_more_rows_is_not_known(write, config):
    assert largest_rank([write("a", r=4), write("b", **config)]) is None


def test_a_folder_without_a_config_is_not_known(tmp_path):
    assert largest_rank([tmp_path]) is None


def test_ranks_are_known_where_no_folder_has_other_adapters(write):
    given = {"a": write("a", r=4)}
    assert usual_rank(EngineConfig("m"), given) == 4
    assert usual_rank(EngineConfig("m", max_lora_rank=2), given) == 2  # which refuses it later
    assert usual_rank(EngineConfig("m"), {}) is None
    assert usual_rank(EngineConfig("m", lora_dir="adapters"), given) is None
