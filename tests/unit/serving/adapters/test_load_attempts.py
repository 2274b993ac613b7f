"""A load that ends its process again and again is not tried for ever; others are not blamed."""

import os
import subprocess
import sys

import pytest

from serving.adapters import load_attempts
from serving.adapters.journal import Journal, Loaded
from serving.adapters.load_attempts import MOST_ENDS, LoadAttempts

DIGEST = "ab" * 32

REPLAY = """
import os, sys
from serving.adapters.journal import Journal, replay

class Registry:
    served, refused = [], []
    def load(self, name, path, **more):
        if path == "deadly":
            os._exit(9)
        self.served.append(name)
    def unload(self, name): pass
    def known(self): return ()
    def refuse(self, name, why): self.refused.append((name, why))

journal = Journal(sys.argv[1])
replay(journal.read(), Registry(), journal.attempts)
print(Registry.served, Registry.refused)
"""


def restarted(folder) -> subprocess.CompletedProcess:
    """Replay the journal in a process of its own."""
    command = [sys.executable, "-c", REPLAY, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_that_ends_its_process_is_quarantined_until_it_is_loaded_again(tmp_path):
    """Before: every restart tried it again, for ever."""
    journal = Journal(tmp_path)
    for name, path in (("good", "x"), ("bad", "deadly"), ("late", "y")):
        journal.loaded(name, Loaded(path, DIGEST))
    ends = [restarted(tmp_path).returncode for _ in range(MOST_ENDS)]
    assert ends == [9] * MOST_ENDS
    for _ in range(2):
        done = restarted(tmp_path)
        assert done.returncode == 0, done.stderr
        assert "['good', 'late']" in done.stdout
        assert f"Quarantined: {MOST_ENDS} processes in a row" in done.stdout
        assert "Load it again" in done.stdout
    journal.loaded("bad", Loaded("deadly", DIGEST))
    assert restarted(tmp_path).returncode == 9
    journal.loaded("bad", Loaded("mended", "cd" * 32))
    assert "['good', 'late', 'bad']" in restarted(tmp_path).stdout


def test_only_what_never_ended_counts(tmp_path):
    attempts = LoadAttempts(tmp_path)
    for _ in range(2 * MOST_ENDS):
        with attempts.attempt("a", DIGEST):
            pass
        with pytest.raises(OSError, match="gone"), attempts.attempt("a", DIGEST):
            raise OSError("gone")
    assert not attempts.is_quarantined("a", DIGEST)
    for _ in range(MOST_ENDS):
        attempts._note("+", "a", DIGEST)
    assert attempts.is_quarantined("a", DIGEST)
    assert not attempts.is_quarantined("a", "cd" * 32)
    assert not attempts.is_quarantined("b", DIGEST)
    attempts.forget("a", DIGEST)
    assert not attempts.is_quarantined("a", DIGEST)


def test_loads_under_way_in_other_processes_are_no_ends(tmp_path):
    """Before: of four instances that started at once, one refused an adapter that was good."""
    attempts = LoadAttempts(tmp_path)
    code = "import sys\nfrom pathlib import Path\n"
    code += "from serving.adapters.load_attempts import LoadAttempts\n"
    code += f"attempts, DIGEST = LoadAttempts(Path(sys.argv[1])), {DIGEST!r}\n"
    code += "held = attempts.attempt('a', DIGEST)\nheld.__enter__()\n"
    code += "print(flush=True)\nsys.stdin.read()\nimport os\nos._exit(9)\n"
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    others = [subprocess.Popen(command, **pipes) for _ in range(MOST_ENDS)]
    try:
        for other in others:
            assert other.stdout.readline()
        assert not attempts.is_quarantined("a", DIGEST)
    finally:
        for other in others:
            other.communicate()
    assert attempts.is_quarantined("a", DIGEST)  # now they have ended, without a good load


def test_a_file_that_is_damaged_keeps_no_adapter_away(tmp_path):
    (tmp_path / load_attempts.FILE).write_bytes(b"\xff\xfe + \0\n")
    assert not LoadAttempts(tmp_path).is_quarantined("a", DIGEST)


def test_the_file_stays_small_and_half_lines_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(load_attempts, "_COMPACT_BYTES", 500)
    attempts = LoadAttempts(tmp_path)
    for _ in range(MOST_ENDS):
        attempts._note("+", "bad", DIGEST)
    for number in range(50):
        with attempts.attempt(f"a{number}", DIGEST):
            pass
    assert os.path.getsize(tmp_path / load_attempts.FILE) < 1000
    assert attempts.is_quarantined("bad", DIGEST)
    with (tmp_path / load_attempts.FILE).open("a") as file:
        file.write("+ half")
    assert attempts.is_quarantined("bad", DIGEST)


def test_a_disk_that_takes_nothing_keeps_no_adapter_away(tmp_path):
    (tmp_path / load_attempts.FILE).mkdir()
    attempts, done = LoadAttempts(tmp_path), []
    assert not attempts.is_quarantined("a", DIGEST)
    with attempts.attempt("a", DIGEST):
        done.append("a")
    assert done
