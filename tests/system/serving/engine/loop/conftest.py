"""A loop over a device that answers at once."""

import pytest
from support.cases import tiny_checkpoint
from support.cases.loop_cases import Case

from serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_checkpoint.write_model(folder, tiny_checkpoint.TinyShape(hidden=8, width=8))
    return Tokenizer(folder)


@pytest.fixture
def case(tokenizer):
    made = Case(tokenizer)
    yield made
    made.runner.trouble = lambda plan: None
    made.loop.close()
    made.compilations.close()
