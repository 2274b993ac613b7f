import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from support.processes.server_process import ROOT
from support.waiting import wait_until

from bench import gpu_batch
from bench.gpu_parts import PARTS, Part

_WRITES = """-c "import pathlib; pathlib.Path('{out}/a.json').write_text('7')" """
# The child outlives its parent unless the whole group is ended. The parent imports little, so that
# it has begun the child before its part's limit on a busy machine too.
_HANGS = (
    """-ISc "import os, time; child = os.posix_spawnp('sleep', ['sleep', '600'], os.environ); """
    """open('{out}/pid', 'w').write(str(child)); time.sleep(600)" """
)


def _is_gone(pid: int) -> bool:
    """Tell if a process has ended, waiting for whom it was handed to."""
    for _ in range(1200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_parts_run_in_turn_and_what_they_wrote_is_packed(tmp_path):
    parts = [
        Part("writes", _WRITES, 60),
        Part("fails", '-c "raise SystemExit(3)"', 60),
        Part("hangs", _HANGS, 3),
        Part("large", _WRITES, 60, devices=4),
        Part("last", _WRITES, 60),
    ]
    rows = gpu_batch.run_batch(parts, tmp_path, 600, num_gpus=1)
    assert [row.get("status", "left out") for row in rows] == [0, 3, None, "left out", 0]
    assert "needs 4 GPUs, there are 1" in rows[3]["left_out"]
    assert _is_gone(int((tmp_path / "hangs" / "pid").read_text()))
    assert json.loads((tmp_path / "batch.json").read_text()) == rows
    with tarfile.open(tmp_path / "batch.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"writes/a.json", "last/a.json", "hangs.log", "batch.json"} <= names


def test_a_batch_keeps_its_budget(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_batch, "_LEAST_SECONDS", 1)
    began = time.monotonic()
    rows = gpu_batch.run_batch(
        [Part("hangs", _HANGS, 600), Part("late", _WRITES, 60)], tmp_path, 2, num_gpus=1
    )
    assert time.monotonic() - began < 30
    assert rows[0]["status"] is None
    assert "of the budget are left" in rows[1]["left_out"]
    assert "ended at its limit" in capsys.readouterr().out


def test_a_batch_that_is_ended_leaves_no_part_behind(tmp_path):
    make = f"gpu_batch.PARTS = (gpu_batch.Part('hangs', {_HANGS!r}, 600),)"
    run = f"gpu_batch.main(['--out', {str(tmp_path)!r}])"
    batch = subprocess.Popen(
        [sys.executable, "-c", f"from bench import gpu_batch; {make}; {run}"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
    )
    child = tmp_path / "hangs" / "pid"
    wait_until(lambda: child.exists() and child.read_text())
    batch.terminate()
    assert batch.wait(60) == 128 + signal.SIGTERM
    assert _is_gone(int(child.read_text()))


def test_a_signal_that_comes_while_a_part_starts_leaves_none_behind(tmp_path, monkeypatch):
    class Signalled(subprocess.Popen):
        """A process that has begun when the batch is ended, and is in no variable yet."""

        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            begun.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    begun, before = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(gpu_batch.subprocess, "Popen", Signalled)
    monkeypatch.setattr(gpu_batch, "PARTS", (Part("hangs", _HANGS, 600),))
    monkeypatch.setattr(gpu_batch, "count_gpus", lambda environ: 1)
    try:
        with pytest.raises(SystemExit) as ended:
            gpu_batch.main(["--out", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert _is_gone(begun[0])


def test_an_unknown_part_is_refused_by_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_batch.main(["--out", str(tmp_path), "--parts", "towers"])
    error = capsys.readouterr().err
    assert "no part is named 'towers'" in error
    assert "tower, " in error


def test_parts_are_listed_without_a_folder_and_run_only_with_one(capsys):
    gpu_batch.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in PARTS]
    with pytest.raises(SystemExit):
        gpu_batch.main([])
    assert "--out: a folder" in capsys.readouterr().err


def test_each_part_names_a_module_that_exists():
    for part in PARTS:
        flag, module = shlex.split(part.command)[:2]
        assert flag == "-m"
        assert importlib.util.find_spec(module), part.name
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_the_command_line_tells_if_a_part_failed(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # that of the tests stays
    monkeypatch.setattr(gpu_batch, "PARTS", (Part("fails", '-c "raise SystemExit(3)"', 60),))
    with pytest.raises(SystemExit, match="1"):
        gpu_batch.main(["--out", str(tmp_path)])
