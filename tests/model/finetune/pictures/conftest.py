"""The tiny model folder and the sources that the tests of this room share."""

from pathlib import Path

import pytest
from support.cases import tiny_pictures

from lora_jax.finetune.pictures import tasks
from lora_jax.finetune.pictures.adapter import Base


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory) -> Path:
    return tiny_pictures.write_folder(tmp_path_factory.mktemp("pictures") / "tiny")


@pytest.fixture(scope="session")
def picture_base(picture_folder) -> Base:
    return Base.read(picture_folder)


@pytest.fixture(scope="session")
def picture_parts() -> dict[bool, tasks.Sources]:
    return tasks.parts(tiny_pictures.sources())
