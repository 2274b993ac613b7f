"""The tiny model folder that tests of this room read and do not write to."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def read_only_folder(tmp_path_factory) -> Path:
    """A random model, its maps in whole blocks of NF4."""
    from support.cases.finetune_cases import WIDE_CONFIG, make_folder  # here: few workers need it

    return make_folder(tmp_path_factory.mktemp("finetune") / "tiny", config=WIDE_CONFIG)
