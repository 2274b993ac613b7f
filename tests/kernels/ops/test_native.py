"""Building: once for a machine, whoever asks at the same time; failure is told, nothing stays."""

import concurrent.futures
import dataclasses
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.waiting import wait_until

from lora_jax import own_files
from lora_jax.ops import native
from lora_jax.ops.native import CPP_FLAGS, BuildError

RUNS = """
#include <memory>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
struct Runs { inline static ffi::TypeId id = {}; int count = 0; };
ffi::ErrorOr<std::unique_ptr<Runs>> make() { return std::make_unique<Runs>(); }
ffi::Error count(Runs* runs, S32 first, ffi::Result<S32> out) {
  *out->typed_data() = *first.typed_data() + runs->count++;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(test_runs, make, ffi::Ffi::BindInstantiate());
extern "C" XLA_FFI_TypeId* test_runs_id() { return &Runs::id; }
extern "C" const XLA_FFI_TypeInfo* test_runs_info() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Runs>();
  return &info;
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    test_count, count, ffi::Ffi::Bind().Ctx<ffi::State<Runs>>().Arg<S32>().Ret<S32>());
"""


@pytest.fixture
def library(tmp_path):
    """A library of one empty function."""
    source = tmp_path / "sources" / "one.cc"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }')
    return native.cpp_library("one", "test library", source.parent, ())


def test_units_are_compiled_side_by_side_and_become_one_library(library, tmp_path):
    folder, cache = tmp_path / "sources", tmp_path / "cache"
    (folder / "two.cc").write_text(
        'extern "C" int one(); extern "C" int two() { return 1 + one(); }'
    )
    both = native.cpp_library("both", "test library", folder, ())
    made = both.load(cache)
    assert (made.one(), made.two()) == (1, 2)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_unit_that_fails_is_told_and_leaves_nothing(library, tmp_path):
    folder, cache = tmp_path / "sources", tmp_path / "cache"
    (folder / "two.cc").write_text("int two() { return none; }")
    both = native.cpp_library("both", "test library", folder, ())
    with pytest.raises(BuildError, match=r"(?s)failed: .*two\.cc.*none"):
        both.build(cache)
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}


def test_what_a_killed_process_left_is_removed_by_the_next_that_compiles(library, tmp_path):
    name = library.build(tmp_path / "before").stem
    (cache := tmp_path / "cache").mkdir(mode=0o700)
    (cache / f"{name}.77.x.part").mkdir()
    for left in (f"{name}.77.x.part/one.o", f"{name}.77.part", f"other-{name}.77.part"):
        (cache / left).write_bytes(b"half")
    built = library.build(cache)
    assert {path.name for path in cache.iterdir() if path.suffix == ".part"} == {
        f"other-{name}.77.part"
    }
    assert own_files.is_whole(built)


def test_concurrent_builds_compile_once(library, monkeypatch, tmp_path, caplog):
    compiled, waits = [], "Waiting for another process that compiles the test library."
    caplog.set_level("INFO", logger=native.log.name)

    def slow_compile(what, compiler, path):
        compiled.append(path)
        wait_until(lambda: waits in caplog.messages)
        (path.parent / "part").write_bytes(b"library")
        own_files.publish(path.parent / "part", path)

    monkeypatch.setattr(native, "compile_library", slow_compile)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(library.build, [tmp_path / "cache"] * 4))
    assert len(compiled) == 1
    assert paths == set(compiled)
    assert library.build(tmp_path / "cache") == compiled[0]


def test_what_was_compiled_is_loaded(library, tmp_path):
    assert library.load(tmp_path / "cache").one() == 1
    files = list((tmp_path / "cache").iterdir())
    assert sorted(p.suffix for p in files) == [".lock", ".sha256", ".so"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}


def half(library):
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def empty(library):
    library.write_bytes(b"")


def corrupt(library):
    data = bytearray(library.read_bytes())
    data[0x18:0x40] = bytes(0x28)  # of the ELF header
    library.write_bytes(data)


def foreign(library):
    library.chmod(0o666)


@pytest.mark.parametrize("damage", [half, empty, corrupt, foreign])
def test_a_damaged_library_is_compiled_again(library, tmp_path, damage, caplog):
    """Before digests the first ended the process with SIGBUS at every start."""
    built = library.build(tmp_path / "cache")
    good = built.read_bytes()
    damage(built)
    code = (
        "import pathlib, sys; from lora_jax.ops import native\n"
        "folder, cache = map(pathlib.Path, sys.argv[1:])\n"
        "print(native.cpp_library('one', 'test library', folder, ()).load(cache).one())"
    )
    arguments = [str(library.sources[0].parent), str(tmp_path / "cache")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert own_files.is_whole(built)
    assert built.read_bytes() == good


def test_a_library_in_a_folder_that_others_may_write_is_not_loaded(library, tmp_path, caplog):
    cache = tmp_path / "cache"
    built = library.build(cache)
    library.sources[0].write_text('extern "C" int one() { return 666; }')
    planted = library.build(tmp_path / "elsewhere")
    library.sources[0].write_text('extern "C" int one() { return 1; }')
    for file in planted.parent.iterdir():
        (cache / file.name.replace(planted.stem, built.stem)).write_bytes(file.read_bytes())
    cache.chmod(0o777)
    assert library.load(cache).one() == 1
    said = f"other users may write {cache} (mode 0777): run chmod go-w {cache}, or name another"
    assert said in caplog.text
    assert "test library are compiled anew at each start" in caplog.text


def test_each_call_of_each_program_keeps_its_own_state(tmp_path):
    (tmp_path / "runs.cc").write_text(RUNS)
    named = native.cpp_library("runs", "test library", tmp_path, ("test_count",))
    stateful = {"stateful": ("test_count",), "state": "test_runs", "flags": ("-O0", *CPP_FLAGS[1:])}
    jax.devices()  # who comes before gives XLA's CPU client calls ahead of types
    dataclasses.replace(named, **stateful).load(tmp_path / "cache")
    count = jax.ffi.ffi_call("test_count", jax.ShapeDtypeStruct((), jnp.int32))
    both = jax.jit(lambda first: (count(first), count(first + 10)))
    runs = [[int(n) for n in both(jnp.int32(0))] for _ in range(3)]
    assert runs == [[0, 10], [1, 11], [2, 12]]
    assert int(jax.jit(count)(jnp.int32(5))) == 5


def test_a_missing_symbol_is_told(library, tmp_path):
    wrong = dataclasses.replace(library, targets=("two",))
    with pytest.raises(BuildError, match=r"test library cannot be loaded: .*two"):
        wrong.load(tmp_path / "cache")


def test_the_key_follows_flags_machine_and_sources(library, monkeypatch):
    compiler = library.compilers[0]
    keys = {library.key(compiler)}
    keys.add(dataclasses.replace(library, flags=(*library.flags, "-O1")).key(compiler))
    keys.add(dataclasses.replace(library, machine="another cpu").key(compiler))
    monkeypatch.setenv("LORA_JAX_MARCH", "x86-64")  # other than the suite itself may have
    other = native.cpp_library("one", "test library", library.sources[0].parent, ())
    assert "-march=x86-64" in other.flags
    keys.add(other.key(compiler))
    library.sources[0].write_text("int x;")
    keys.add(library.key(compiler))
    assert len(keys) == 5
    assert library.key(compiler) in keys


def test_features_are_those_that_the_system_tells(tmp_path, monkeypatch):
    def tells(*lines):
        (tmp_path / "cpuinfo").write_text("\n".join(lines))
        return native.cpu_features()

    monkeypatch.setattr(native, "Path", lambda name: tmp_path / "cpuinfo")
    assert tells("model name\t: a CPU", "flags\t\t: fma avx2", "flags : other") == {"fma", "avx2"}
    assert tells("Features\t: fp asimd") == {"fp", "asimd"}
    assert tells("model name : a CPU") == frozenset()
    (tmp_path / "cpuinfo").unlink()
    assert native.cpu_features() == frozenset()


@pytest.mark.parametrize(
    ("march", "machine", "features", "tuned"),
    [
        (None, "x86_64", {"avx2", "fma"}, "haswell"),
        (None, "x86_64", {"avx2", "fma", "avx512f"}, "icelake-server"),
        (None, "x86_64", {"sse2"}, None),
        (None, "aarch64", {"asimd"}, None),
        ("x86-64-v3", "x86_64", {"avx2", "avx512f"}, "haswell"),
        ("x86-64", "x86_64", {"avx2"}, None),
        ("znver3", "x86_64", {"avx2"}, None),
    ],
)
def test_code_for_vectors_is_tuned_as_measured_best(monkeypatch, march, machine, features, tuned):
    monkeypatch.setenv("LORA_JAX_MARCH", march or "")
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "cpu_features", lambda: frozenset(features))
    library = native.cpp_library("one", "test library", Path(__file__).parent, ())
    flags = (f"-march={march or 'native'}", *((f"-mtune={tuned}",) if tuned else ()))
    assert library.flags == (*CPP_FLAGS, *flags)


def test_a_moved_tree_takes_the_library_of_before(library, tmp_path):
    moved = tmp_path / "moved"
    sources = tuple(moved / source.name for source in library.sources)
    shutil.copytree(library.sources[0].parent, moved)
    here = dataclasses.replace(library, includes=(library.sources[0].parent,))
    there = dataclasses.replace(library, includes=(moved,), sources=sources)
    compiler = library.compilers[0]
    assert f"-I{moved}" in there.command(compiler, tmp_path / "out.so")
    assert there.key(compiler) == here.key(compiler)


def test_a_compiler_error_is_told_and_leaves_no_file(library, tmp_path):
    library.sources[0].write_text("this is not C++")
    with pytest.raises(BuildError, match=r"failed: .*one\.cc"):
        library.build(tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]


def test_a_cache_that_cannot_be_written_is_told_and_done_without(library, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    assert library.load(file / "cache").one() == 1
    library.build(file / "cache")
    assert caplog.text.count("compiled anew at each start") == 1


def test_a_full_disk_is_told_and_done_without(library, tmp_path, caplog):
    """The kernels were off then, and every op ran as plain JAX."""
    cache, fake = tmp_path / "cache", tmp_path / "g++"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *{cache}*) echo No space left on device >&2; exit 1;; esac\n'
        f'exec {library.compilers[0].path} "$@"\n'
    )
    fake.chmod(0o755)
    there = dataclasses.replace(library, compilers=(native.Compiler(str(fake)),))
    assert there.load(cache).one() == 1
    assert f"at each start: [Errno 28] No space left on device: '{cache}'" in caplog.text


def test_nowhere_to_write_is_an_error(library, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")

    def no_folder(path):
        raise PermissionError(f"no {path}")

    monkeypatch.setattr(native.own_files, "own_folder", no_folder)
    with pytest.raises(BuildError, match="cannot write the kernel cache: no "):
        library.build(tmp_path / "cache")


def test_without_a_compiler_it_is_told(library, tmp_path):
    none = dataclasses.replace(library, compilers=())
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        none.build(tmp_path)


@pytest.fixture
def broken(tmp_path):
    """A compiler that fails, as one does whose wheels are of unequal versions."""
    path = tmp_path / "broken"
    path.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    path.chmod(0o755)
    return native.Compiler(str(path))


def test_the_next_compiler_builds_where_one_fails(library, broken, tmp_path, caplog):
    both = dataclasses.replace(library, compilers=(broken, *library.compilers))
    with caplog.at_level("INFO"):
        made = both.build(tmp_path / "cache")
    assert "broken failed: no headers" in caplog.text
    assert f"with {library.compilers[0].path}" in caplog.text
    caplog.clear()
    assert both.build(tmp_path / "cache") == made == library.build(tmp_path / "cache")
    assert not caplog.records  # kept: the broken one is not tried again


def test_every_compiler_that_failed_is_told(library, broken, tmp_path):
    with pytest.raises(BuildError, match=r"no headers; .*no headers"):
        dataclasses.replace(library, compilers=(broken, broken)).build(tmp_path / "cache")
