"""A bare checkout is refused with the command that installs it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.cli.installed import check_installed

ROOT = Path(__file__).parents[4]


def test_an_installed_package_passes():
    check_installed()


def test_the_error_of_a_bare_checkout_says_what_to_run(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"lora-jax is not installed.*pip install -e \."):
        check_installed()


def test_the_command_of_a_bare_checkout_ends_with_that_error_and_no_traceback(tmp_path):
    """The command's start is run where no metadata of this package is found."""
    code = (
        "import importlib.metadata as m, sys\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name == 'lora-jax':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "from serving import launch\n"
        "sys.exit(launch.main([sys.argv[1], '--port', '0']))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "JAX_PLATFORMS": "cpu"}
    model = str(ROOT / "assets" / "tiny-moe")
    ran = subprocess.run(
        [sys.executable, "-c", code, model], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert "lora-jax is not installed" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
