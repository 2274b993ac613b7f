"""Backend of rows between devices; it is imported only on demand."""

import subprocess
import sys

import pytest

from serving.lora_server.transport.device_endpoints import GROUP, for_platform


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_platform_without_ends_is_said(platform):
    with pytest.raises(NotImplementedError, match=f"'{platform}'"):
        for_platform(platform)


def test_the_backends_entry_is_called_with_the_device(monkeypatch):
    class Entry:
        def load(self):
            return lambda device: ("ends of", device)

    asked = {}

    def entry_points(**wanted):
        asked.update(wanted)
        return [Entry()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert for_platform("gpu", 3) == ("ends of", 3)
    assert asked == {"group": GROUP, "name": "cuda"}


@pytest.mark.long
def test_backends_are_imported_late():
    code = (
        "import sys, serving.lora_server.transport.device_memory; "
        "print([m for m in sys.modules if m.endswith('_backend')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
