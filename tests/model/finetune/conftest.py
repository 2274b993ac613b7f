"""Tiny model folders that tests of this room read and do not write to, and sources of pictures.

Imports are in the fixtures: every worker reads this file, and few need what they import.
"""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def read_only_folder(tmp_path_factory) -> Path:
    """A random model, its maps in whole blocks of NF4."""
    from support.cases.finetune_cases import WIDE_CONFIG, make_folder

    return make_folder(tmp_path_factory.mktemp("finetune") / "tiny", config=WIDE_CONFIG)


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory) -> Path:
    """A random model with a tower."""
    from support.cases import tiny_pictures

    return tiny_pictures.write_folder(tmp_path_factory.mktemp("pictures") / "tiny")


@pytest.fixture(scope="session")
def picture_base(picture_folder) -> Any:
    from lora_jax.finetune.pictures.adapter import Base

    return Base.read(picture_folder)


@pytest.fixture(scope="session")
def picture_parts() -> dict[bool, Any]:
    """Sources to learn from (False) and those that are held out."""
    from support.cases import tiny_pictures

    from lora_jax.finetune.pictures import tasks

    return tasks.parts(tiny_pictures.sources())


@pytest.fixture
def picture_data(tmp_path) -> Path:
    """A folder of sources, as `collect` writes it."""
    from support.cases import tiny_pictures

    folder = tmp_path / "data"
    folder.mkdir()
    for name, source in tiny_pictures.sources().items():
        source.save(folder / f"{name}.npz")
    return folder
