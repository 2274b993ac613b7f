"""Bits that depend on the compiler, where the other tests compile fast."""

import os
import re
import subprocess
import sys

import pytest
from support.processes.compiler import as_shipped
from support.processes.server_process import ROOT

MARK = re.compile(r"(?<!\.long\n    @pytest\.)mark\.as_shipped")  # of a test that is not long
FILES = [f for f in (ROOT / "tests").rglob("test_*.py") if MARK.search(f.read_text())]
CHOICE = "as_shipped and not (gpu or multigpu or aot or slow or long)"


@pytest.mark.skipif(not os.environ.get("FAST_COMPILE"), reason="all tests compile as shipped")
@pytest.mark.timeout(2400)
def test_tests_of_bits_pass_as_shipped():
    environment = as_shipped({k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")})
    environment["FAST_COMPILE"] = ""
    files = [str(file) for file in FILES if file.name != "test_as_shipped.py"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", CHOICE, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
