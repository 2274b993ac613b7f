"""The C++ end of the transport reads what a hostile peer writes: no touch of foreign memory."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processes.server_process import ROOT

HERE = Path(__file__).parent / "csrc"
PRODUCT = ROOT / "serving" / "lora_server" / "transport" / "csrc"
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-fno-sanitize-recover=all")
FLAGS += ("-fsanitize=address,undefined",)
TARGETS = 5

# One check taken away each: the fuzz must notice every one of them.
MUTANTS = {
    "server takes more rows than a slot holds": (
        "server.h",
        "header->rows <= shapes.max_rows &&",
        "",
    ),
    "server takes sites beyond the plan": (
        "server.h",
        "header->site < int32_t(shapes.sites.size())",
        "true",
    ),
    "client takes answers of other lengths": ("client.h", "header->rows == num_rows &&", ""),
    "client takes answers of other epochs": (
        "client.h",
        "header->epoch != link.epoch || header",
        "header",
    ),
    "relay takes more rows than a slot holds": ("relay.h", "h.rows <= shapes_.max_rows &&", ""),
    "relay hands on answers to other requests": (
        "relay.h",
        "h.sequence != request.sequence || ",
        "",
    ),
    "checksum is not compared": ("header.h", " && header->checksum == checksum(*header)", ""),
}


def compiler() -> str:
    """The C++ compiler, if it has the sanitizers."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler")
    probe = [found, *FLAGS, "-x", "c++", "-", "-o", "/dev/null"]
    if subprocess.run(probe, input=b"int main() {}", capture_output=True).returncode:
        pytest.skip("the C++ compiler has no sanitizers")
    return found


def build(headers: Path, folder: Path) -> Path:
    """Return the compiled fuzz over the headers of a folder; compiled once for its sources."""
    files = sorted((*headers.glob("*.h"), *HERE.iterdir()))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    program = folder / f"fuzz_transport-{digest}"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = program.with_suffix(".part")
        command = [compiler(), *FLAGS, f"-I{headers}", str(HERE / "fuzz_transport.cc"), "-o"]
        subprocess.run([*command, str(part)], check=True, timeout=200)
        part.replace(program)
    return program


def run(program: Path, seed: int, count: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, str(seed), str(count)], capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def program() -> Path:
    return build(PRODUCT, ROOT / ".cache" / "fuzz")


@pytest.mark.long
def test_20000_inputs_of_a_hostile_peer(program):
    done = run(program, 1, 20_000)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("inputs") == TARGETS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_more_inputs_of_a_hostile_peer(program, seed):
    done = run(program, seed, 200_000)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fuzz_finds_a_check_that_is_missing(mutant, tmp_path):
    name, old, new = MUTANTS[mutant]
    for header in PRODUCT.glob("*.h"):
        text = header.read_text()
        if header.name == name:
            assert text.count(old) == 1, f"{old!r} is not in {name}; correct the mutant"
            text = text.replace(old, new)
        (tmp_path / header.name).write_text(text)
    done = run(build(tmp_path, tmp_path / "out"), 1, 20_000)
    assert done.returncode != 0
    assert "is false" in done.stderr or "Sanitizer" in done.stderr
