"""Building: once for a machine, whoever asks at the same time; failure is told, nothing stays."""

import concurrent.futures
import dataclasses
import time

import pytest

from lora_jax.ops import native
from lora_jax.ops.native import BuildError


@pytest.fixture
def library(tmp_path):
    """A library of one empty function."""
    source = tmp_path / "sources" / "one.cc"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }')
    return native.cpp_library("one", "test library", source.parent, ())


def test_concurrent_builds_compile_once(library, monkeypatch, tmp_path):
    compiled = []

    def slow_compile(what, compiler, path):
        compiled.append(path)
        time.sleep(0.2)
        path.write_bytes(b"library")

    monkeypatch.setattr(native, "compile_library", slow_compile)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(library.build, [tmp_path / "cache"] * 4))
    assert len(compiled) == 1
    assert paths == set(compiled)
    assert library.build(tmp_path / "cache") == compiled[0]


def test_what_was_compiled_is_loaded(library, tmp_path):
    assert library.load(tmp_path / "cache").one() == 1
    files = list((tmp_path / "cache").iterdir())
    assert sorted(p.suffix for p in files) == [".lock", ".so"]


def test_a_missing_symbol_is_told(library, tmp_path):
    wrong = dataclasses.replace(library, targets=("two",))
    with pytest.raises(BuildError, match=r"test library cannot be loaded: .*two"):
        wrong.load(tmp_path / "cache")


def test_the_key_follows_flags_machine_and_sources(library):
    compiler = library.compiler
    assert compiler is not None
    keys = {library.key(compiler)}
    keys.add(dataclasses.replace(library, flags=(*library.flags, "-O1")).key(compiler))
    keys.add(dataclasses.replace(library, machine="another cpu").key(compiler))
    library.sources[0].write_text("int x;")
    keys.add(library.key(compiler))
    assert len(keys) == 4
    assert library.key(compiler) in keys


def test_a_compiler_error_is_told_and_leaves_no_file(library, tmp_path):
    library.sources[0].write_text("this is not C++")
    with pytest.raises(BuildError, match=r"failed: .*one\.cc"):
        library.build(tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]


def test_a_cache_that_cannot_be_written_is_told(library, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BuildError, match="cannot write the kernel cache"):
        library.build(file / "cache")


def test_without_a_compiler_it_is_told(library, tmp_path):
    none = dataclasses.replace(library, compiler=None)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        none.build(tmp_path)
