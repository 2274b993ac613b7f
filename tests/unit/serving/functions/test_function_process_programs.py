"""Programs that functions load: a function cannot leave one for others."""

import json
import os
import subprocess
import sys

import pytest
from support.processes.server_process import ROOT

from serving.runtime import program_cache

MODEL = str(ROOT / "assets" / "stories260k")
PLANT = """
import json, os, sys
from pathlib import Path
from serving.functions.function_process import _enter_jail
from serving.runtime.program_cache import keep_programs_apart
made, order = [], json.loads(sys.argv[1])
folders = keep_programs_apart(**order["programs"])
_enter_jail(order, folders)
for folder in folders:
    for file in (folder / "planted.program", folder.parent / "planted", folder / "kept.program"):
        try:
            file.write_bytes(b"code of an attacker")
            made.append(str(file))
        except PermissionError:
            pass
read = [(folder / "kept.program").read_text() for folder in folders]
print(json.dumps([[str(f) for f in folders], made, read]))
"""


@pytest.mark.parametrize("writes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_function_cannot_plant_a_program_that_others_would_load(tmp_path, writes):
    """The one process that makes programs has no adapter."""
    programs = {"kind": "functions", "writes": writes}
    order = {"model": MODEL, "adapter": None, "fields": {}, "device": "cpu", "programs": programs}
    order["jail"] = {"memory_bytes": None, "gpus": False}
    machine = program_cache._machine()
    for folder in ("programs/functions", "programs/functions/steps"):
        (tmp_path / folder / machine).mkdir(parents=True, mode=0o700)
        (tmp_path / folder / machine / "kept.program").write_text("kept")
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", PLANT, json.dumps(order)]
    env = {n: v for n, v in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"LORA_JAX_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    if "Landlock" in done.stderr:
        pytest.skip("this kernel has no Landlock")
    folders, made, _ = json.loads(done.stdout)
    assert len(folders) == 2
    here = [f"{folder}/{name}.program" for folder in folders for name in ("planted", "kept")]
    assert made == (here if writes else [])
