"""Kernels compiled beforehand: the best level that the CPU has, never one of other sources."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.processes.server_process import ROOT

from lora_jax import own_files
from lora_jax.ops import dispatch, native
from lora_jax.ops.cpu import build, prebuilt

ALL = prebuilt.LEVELS["x86_64"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an empty file for each level, on a machine with AVX-512."""
    monkeypatch.delenv(dispatch.MARCH_ENV, raising=False)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: ALL[1].needs)
    for level in ALL:
        write(tmp_path / prebuilt._file_name(level))
    return tmp_path


def write(file):
    """Publish an empty file, as compiling does."""
    (part := file.with_suffix(".part")).touch()
    own_files.publish(part, file)


@pytest.mark.parametrize("level", ALL, ids=[level.name for level in ALL])
def test_the_best_level_that_the_cpu_has_is_taken(folder, monkeypatch, level):
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: level.needs | {"sse2"})
    assert prebuilt.find(folder) == folder / prebuilt._file_name(level)


def test_a_named_level_is_taken_and_no_other(folder, monkeypatch):
    monkeypatch.setenv(dispatch.MARCH_ENV, "x86-64-v3")
    assert prebuilt.find(folder) == folder / prebuilt._file_name(ALL[2])
    monkeypatch.setenv(dispatch.MARCH_ENV, "haswell")
    assert prebuilt.find(folder) is None


def test_a_level_that_the_cpu_lacks_is_not_taken_by_its_name(folder, monkeypatch):
    monkeypatch.setenv(dispatch.MARCH_ENV, "x86-64-v4-bf16")
    assert prebuilt.find(folder) is None


def test_files_of_other_sources_or_interfaces_are_not_taken(folder, monkeypatch):
    monkeypatch.setattr(prebuilt, "_interface", lambda: "0 99")
    assert prebuilt.find(folder) is None


def test_files_of_other_sources_have_other_names(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    (source := tmp_path / "one.cc").write_text("int one;")
    (tmp_path / "two.h").write_text("int two;")
    names = {prebuilt._file_name(ALL[0])}
    source.write_text("int one, more;")
    names.add(prebuilt._file_name(ALL[0]))
    (tmp_path / "two.h").write_text("")
    names.add(prebuilt._file_name(ALL[0]))
    assert len(names) == 3


def test_another_architecture_has_none(folder, monkeypatch):
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "riscv64")
    assert prebuilt.find(folder) is None


def test_what_is_ready_is_not_compiled(folder, monkeypatch, tmp_path):
    ready = folder / prebuilt._file_name(ALL[1])
    monkeypatch.setattr(prebuilt, "find", lambda: ready)
    monkeypatch.setattr(build.ctypes, "CDLL", str)
    monkeypatch.setattr(native, "compile_library", lambda *_: pytest.fail("compiled"))
    assert build.library().build(tmp_path / "cache") == ready
    assert not (tmp_path / "cache").exists()


def test_a_file_that_cannot_be_loaded_is_compiled_anew(folder, monkeypatch, caplog):
    monkeypatch.setattr(prebuilt, "find", lambda: folder / prebuilt._file_name(ALL[1]))  # empty
    assert build.library().ready is None
    assert "The prebuilt CPU kernels cannot be loaded" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "no digest"])
def test_a_file_that_was_cut_is_not_loaded_but_compiled(tmp_path, monkeypatch, caplog, damage):
    """Its pages that are missing would end the process by SIGBUS."""
    (part := tmp_path / "part").write_bytes(b"library" * 1000)
    own_files.publish(part, file := tmp_path / "kernels.so")
    if damage == "cut":
        os.truncate(file, 3500)
    else:
        own_files.digest_path(file).unlink()
    monkeypatch.setattr(prebuilt, "find", lambda: file)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda _: pytest.fail("loaded"))
    assert build.library().ready is None
    assert "kernels.so are damaged, or lack their .sha256 file: they are compiled" in caplog.text


def test_only_avx2_without_avx512_has_another_tuning():
    tuned = {level.name for level in ALL if set(native.AVX2_TUNING) & set(level.flags)}
    assert tuned == {"x86-64-v3"}


@pytest.fixture
def compiled(monkeypatch):
    """The libraries that were compiled, which are not; their files are there."""
    made = []

    def compile_library(library, compiler, file):
        made.append((library, compiler))
        write(file)

    monkeypatch.setattr(native, "compile_library", compile_library)
    return made


def test_a_level_is_compiled_for_its_cpus_and_brings_its_library(tmp_path, compiled):
    files = prebuilt.build(tmp_path / "out", native.Compiler("a-g++"), ALL[:2])
    assert files == [tmp_path / "out" / prebuilt._file_name(level) for level in ALL[:2]]
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}
    assert all(map(own_files.is_unchanged, files))
    for (library, compiler), level in zip(compiled, ALL, strict=False):
        assert compiler.path == "a-g++"
        assert set(library.flags) >= {*level.flags, *native.CPP_FLAGS, "-static-libstdc++"}
        assert library.sources == native.cpp_sources(prebuilt.FOLDER)


def test_the_command_compiles_every_level_of_an_architecture(
    tmp_path, compiled, monkeypatch, capsys
):
    options = ["--architecture", "aarch64", "--compiler", "aarch64-g++", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prebuilt", *options])
    prebuilt.main()
    (level,) = prebuilt.LEVELS["aarch64"]
    assert capsys.readouterr().out == f"{tmp_path / prebuilt._file_name(level)}\n"
    assert [compiler.path for _, compiler in compiled] == ["aarch64-g++"]
    monkeypatch.setattr(sys, "argv", ["prebuilt", *options[:2]])
    monkeypatch.setattr(native, "cpp_compilers", lambda: ())
    with pytest.raises(SystemExit):
        prebuilt.main()
    assert "install g++ or clang++, or name one with --compiler" in capsys.readouterr().err


@pytest.mark.long
def test_levels_of_this_machine_compile_and_load(tmp_path):
    features, levels = prebuilt.cpu_features(), prebuilt.LEVELS[prebuilt.platform.machine()]
    best = next(level for level in levels if level.needs <= features)
    made = prebuilt.build(tmp_path, native.cpp_compilers()[0], [best])
    assert [prebuilt.find(tmp_path)] == made
    library = native.ctypes.CDLL(str(made[0]))
    assert all(hasattr(library, name) for name in build.TARGETS)


CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")


@pytest.mark.long
@pytest.mark.parametrize("level", [*ALL, *prebuilt.LEVELS["aarch64"]], ids=lambda level: level.name)
def test_rows_have_the_same_bits_in_any_company_at_each_level(tmp_path, level):
    """Run by the CPU, or NEON by an emulator: g++-aarch64-linux-gnu and qemu-user-static."""
    machine = next(name for name, levels in prebuilt.LEVELS.items() if level in levels)
    here = machine == prebuilt.platform.machine()
    if here and not level.needs <= prebuilt.cpu_features():
        pytest.skip(f"this CPU is none of {level.name}")
    compiler = native.cpp_compilers()[0].path if here else machine == "aarch64" and CROSS
    if not compiler or not (here or EMULATOR):
        pytest.skip(f"no cross compiler or emulator for {machine}")
    sources, made = Path(__file__).parent / "levels", tmp_path / "rows"
    flags = [*(flag for flag in native.CPP_FLAGS if flag not in ("-shared", "-fPIC")), *level.flags]
    includes = [f"-I{folder}" for folder in (sources, prebuilt.FOLDER)]
    command = [compiler, *flags, "-static", *includes, str(sources / "rows.cc"), "-o", str(made)]
    subprocess.run(command, check=True)
    run = [str(made)] if here else [EMULATOR, str(made)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout[-500:].count("\n")) == (0, 1), result.stdout[-500:]


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """What hatchling asks before a wheel of a tree, and the commands that it has run."""
    file = ROOT / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels = tmp_path / module.KERNELS
    kernels.mkdir(parents=True)
    (kernels / "old.so").touch()
    ran = []

    def run(command, **_):
        ran.append(command)
        (kernels / "new.so").touch()

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    made = module.KernelsHook(str(tmp_path), {}, None, None, "", "wheel")
    return made, module.VARIABLE, kernels, ran


def test_a_wheel_has_new_kernels_where_they_are_asked_for(hook, monkeypatch):
    made, variable, kernels, ran = hook
    monkeypatch.setenv(variable, "1")
    data = {}
    made.initialize("standard", data)
    assert [file.name for file in kernels.glob("*.so")] == ["new.so"]
    assert ran[0][1:] == ["-m", "lora_jax.ops.cpu.prebuilt"]
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-linux_")
    made.finalize("standard", data, "")
    assert list(kernels.iterdir()) == []


def test_a_wheel_is_for_its_platform_only_where_it_has_kernels(hook, monkeypatch):
    made, variable, kernels, ran = hook
    data = {}
    made.initialize("standard", data)
    assert data["tag"].startswith("py3-none-linux_")  # those that lie there
    (kernels / "old.so").unlink()
    data = {}
    made.initialize("standard", data)
    monkeypatch.setenv(variable, "1")
    made.initialize("editable", data)
    assert data == {}
    assert ran == []


def test_a_wheel_brings_the_digests_without_which_nothing_is_loaded():
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    patterns = hatch["targets"]["wheel"]["artifacts"]
    file = Path("src/lora_jax/ops/cpu", prebuilt._file_name(ALL[0]))
    for wanted in (file, own_files.digest_path(file)):
        assert any(wanted.match(pattern) for pattern in patterns)
