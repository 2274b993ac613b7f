"""C++ kernels compiled beforehand for levels of CPUs: a machine loads the best that it can run.

`python -m lora_jax.ops.cpu.prebuilt` compiles a file for each level of the architecture beside this
one; a wheel made then has them, and machines without a compiler are fast too. `--compiler` may be a
cross compiler. A file's name has a digest of the sources and of XLA's calling interface: one of
other sources, or for another interface, is never loaded.
"""

import argparse
import dataclasses
import hashlib
import logging
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from lora_jax import own_files
from lora_jax.ops import dispatch, native
from lora_jax.ops.native import AVX2_TUNING, CPP_FLAGS, Compiler, Library, cpu_features

FOLDER = Path(__file__).parent
# Of C++'s own library only what every Linux has is taken from the machine.
_STATIC = ("-static-libstdc++", "-static-libgcc")


@dataclasses.dataclass(frozen=True)
class Level:
    """CPUs with these features, as /proc/cpuinfo spells them; `flags` compile for them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The best first.
LEVELS = {
    "x86_64": (
        Level("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
        Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
        Level("x86-64-v3", ("-march=x86-64-v3", *AVX2_TUNING), _V3),
        Level("x86-64", ("-march=x86-64",), frozenset()),
    ),
    "aarch64": (Level("armv8-a", ("-march=armv8-a",), frozenset()),),
}


def find(folder: Path = FOLDER) -> Path | None:
    """Return the file in a folder for this machine, or for `LORA_JAX_MARCH`; None: there is none.

    With `LORA_JAX_MARCH` only a level of that name counts.
    """
    march, features = os.environ.get(dispatch.MARCH_ENV), cpu_features()
    for level in LEVELS.get(platform.machine(), ()):
        if level.needs <= features and march in (None, "", "native", level.name):
            file = folder / _file_name(level)
            if file.is_file():
                return file
    return None


def build(folder: Path, compiler: Compiler, levels: Sequence[Level]) -> list[Path]:
    """Compile a file for each level into a folder; return them.

    Raises:
        BuildError: the compiler fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for level in levels:
        library = Library(
            name=level.name,
            title=f"CPU kernels for {level.name}",
            compilers=(compiler,),
            wanted="C++ compiler",
            flags=(*CPP_FLAGS, *level.flags, *_STATIC),
            sources=native.cpp_sources(FOLDER),
            unit=".cc",
            targets=(),
            platform="cpu",
        )
        files.append(folder / _file_name(level))
        native.compile_library(library, compiler, files[-1])
        for made in (files[-1], own_files.digest_path(files[-1])):  # others install and read them
            made.chmod(0o644)
    return files


def _file_name(level: Level) -> str:
    digest = hashlib.sha256(_interface().encode())
    for source in native.cpp_sources(FOLDER):
        data = source.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"kernels-{level.name}-{digest.hexdigest()[:16]}.so"


def _interface() -> str:
    """Return the version of XLA's calling interface that jax's headers declare."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    return " ".join(re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", header))


def main() -> None:
    """Compile what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.ops.cpu.prebuilt")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--architecture", choices=list(LEVELS), default=platform.machine())
    parser.add_argument(
        "--compiler", help="C++ compiler (default: the first of g++, clang++ and c++)"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    compilers = (Compiler(args.compiler),) if args.compiler else native.cpp_compilers()
    if not compilers:
        parser.error("no C++ compiler found: install g++ or clang++, or name one with --compiler")
    for file in build(args.out, compilers[0], LEVELS[args.architecture]):
        print(file)


if __name__ == "__main__":
    main()
