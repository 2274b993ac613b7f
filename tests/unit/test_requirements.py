"""The lock files agree with pyproject.toml, name each file by its hash, and name no machine."""

import re
import tomllib

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from support.processes.server_process import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RANGES, EXTRAS = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
LOCKED = {
    "serve": RANGES,
    "dev": RANGES + EXTRAS["dev"] + EXTRAS["train"] + EXTRAS["bench"],
    "otel": RANGES + EXTRAS["otel"],
    **{name: GROUPS[name] for name in ("build", "kernels", "supply-chain", "clients", "vllm-rs")},
}


def pins(name):
    """Return each entry of a lock file that holds on Linux, and its hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if line and not line.lstrip().startswith("#"):
            requirement = Requirement(line.partition("--hash")[0])
            linux = default_environment() | {"sys_platform": "linux", "platform_system": "Linux"}
            if requirement.marker is None or requirement.marker.evaluate(linux):
                hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}(?= |$)", line)
                found[requirement.name.lower().replace("_", "-")] = requirement, hashes
    return found


@pytest.mark.parametrize("name", LOCKED)
def test_every_package_is_locked_within_its_range(name):
    locked = pins(name)
    for text in LOCKED[name]:
        wanted = Requirement(text)
        if wanted.name == "lora-jax":
            continue
        assert wanted.name in locked, f"{name}.txt lacks {wanted}: make lock"
        (pin,) = locked[wanted.name][0].specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version), f"{pin} is not {wanted}: make lock"


@pytest.mark.parametrize("name", LOCKED)
def test_every_file_has_a_hash(name):
    assert all(hashes for _, hashes in pins(name).values())


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_file_names_no_registry_and_no_machine(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert not re.search(r"://|^--|(^|[ =])/\w|index-url|find-links", text, re.MULTILINE)


def test_what_tests_and_server_share_is_one_version():
    serve = pins("serve")
    for name in ("dev", "otel"):
        other = pins(name)
        assert {n: str(r) for n, (r, _) in serve.items()} == {n: str(other[n][0]) for n in serve}


@pytest.mark.parametrize("name", ["serve", "dev"])
def test_what_kernels_are_compiled_with_is_what_is_installed_behind_it(name):
    """Else a package is installed twice, and the kernels are compiled again."""
    other = pins(name)
    assert {n: (str(r), h) for n, (r, h) in pins("kernels").items()} == {
        n: (str(other[n][0]), other[n][1]) for n in pins("kernels")
    }
