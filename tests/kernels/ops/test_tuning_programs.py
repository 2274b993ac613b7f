"""Programs are made once, by a process of its own, and found again in their folder."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops import tuning_programs
from lora_jax.ops.tuning_programs import OPS, Programs, Spills, Tunable, file_name, make

SAID = "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\nUsed 168 registers\n"


@dataclasses.dataclass(frozen=True)
class Config:
    times: int
    spilled: int = 0  # bytes, stored and loaded

    def run(self, x, n):
        """Scale x; leave what an assembler would."""
        said = SAID.format(8, self.spilled, self.spilled)
        Path(os.environ["MOSAIC_GPU_DUMP_TO"], f"kernel_{self.times}.ptxas").write_text(said)
        return [x * self.times + n]


def tunable(op: str) -> Tunable:
    """Return an op that doubles; a module of this name is what OPS leads to."""
    return Tunable(
        op,
        shapes=({"rows": 3},),
        candidates=lambda shape: [Config(2), Config(4)],
        program=lambda shape, config: config.run,
        arguments=lambda shape: (
            jax.ShapeDtypeStruct((shape["rows"],), jnp.float32),
            np.ones(1, np.float32),
        ),
        launches=lambda shape: 1,
    )


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setitem(OPS, "scaled", __name__)
    return "scaled"


def test_a_program_of_a_file_is_loaded_and_not_made_again(op, tmp_path, monkeypatch):
    shape, config = {"rows": 3}, Config(4)
    make(op, shape, config, tmp_path / file_name(op, shape, config))
    assert [f.name for f in tmp_path.iterdir()] == [file_name(op, shape, config)]
    monkeypatch.setattr(tuning_programs, "make", None)
    with Programs(tmp_path, 1) as programs:
        program = programs.compile(op, shape, config)()
    (got,) = program(jnp.arange(3, dtype=jnp.float32), jnp.ones(1, jnp.float32))
    np.testing.assert_array_equal(got, [1, 5, 9])


def test_programs_are_no_graphs_and_files_of_graphs_are_not_read(op, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    with Programs(tmp_path, 1):
        assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_enable_command_buffer="
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"
    name = file_name(op, {"rows": 3}, Config(4))
    monkeypatch.setattr(tuning_programs, "NO_GRAPHS", "")
    assert file_name(op, {"rows": 3}, Config(4)) != name


def test_a_program_that_is_missing_is_made_beside_the_others(op, tmp_path, monkeypatch):
    """Another process would know nothing of this test's op: a thread makes it."""
    monkeypatch.setattr(
        tuning_programs, "ProcessPoolExecutor", lambda n, mp_context: ThreadPoolExecutor(n)
    )
    shape = {"rows": 3}
    with Programs(tmp_path / "kept", 1) as programs:
        load = programs.compile(op, shape, Config(2))
        spilled = programs.compile(op, shape, Config(4, spilled=8))
        programs.wait(progress=False)
        (got,) = load()(jnp.arange(3, dtype=jnp.float32), jnp.ones(1, jnp.float32))
        with pytest.raises(Spills, match="spills 16 bytes"):
            spilled()
    np.testing.assert_array_equal(got, [1, 3, 5])
    assert [f.name for f in (tmp_path / "kept").iterdir()] == [file_name(op, shape, Config(2))]


def test_a_tiling_whose_registers_spill_is_no_program(op, tmp_path):
    shape, config = {"rows": 3}, Config(4, spilled=16)
    with pytest.raises(Spills, match=r"scaled at .* spills 32 bytes"):
        make(op, shape, config, tmp_path / "file")
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_what_no_compiler_takes_fails_when_it_is_asked_for(tmp_path):
    """The other process knows nothing of this test's op."""
    with Programs(tmp_path, 1) as programs:
        load = programs.compile("gated_matmul", {"rows": 3}, Config(4))
        programs.wait(progress=False)
        with pytest.raises(KeyError, match="groups"):
            load()
    assert not [*tmp_path.iterdir()]


def test_a_name_tells_shapes_tilings_and_sources_apart(op, monkeypatch):
    shapes, configs = ({"rows": 3}, {"rows": 4}), (Config(2), Config(4))
    names = {file_name(op, shape, config) for shape in shapes for config in configs}
    monkeypatch.setattr(tuning_programs, "_source_of", lambda op: 0)
    names.add(file_name(op, shapes[0], configs[0]))
    assert len(names) == 5
