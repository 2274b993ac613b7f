"""Memory of a process of a function: its own bytes, and errors that mean a lack of it."""

import os
import subprocess
import sys

import pytest

from serving.functions.process_memory import (
    backbone_memory,
    bounded_private_bytes,
    is_of_memory,
    private_bytes,
)

SMAPS = """\
7f00-7f10 r--s 00000000 00:01 5 /memfd:lora_jax_pages (deleted)
Size:               3744 kB
Pss:                1872 kB
Pss_Dirty:            10 kB
7f20-7f30 rw-p 00000000 00:00 0 [heap]
Size:                 99 kB
Pss:                  99 kB
7f40-7f50 r--s 00000000 00:01 5 /memfd:lora_jax_pages (deleted)
Size:                  4 kB
Pss:                   2 kB
"""


def test_memory_is_the_sum_over_the_backbone_s_maps(tmp_path):
    file = tmp_path / "smaps"
    file.write_text(SMAPS)
    assert backbone_memory(str(file)) == {"Size": 3748 << 10, "Pss": 1874 << 10}


def test_private_bytes_are_the_sum_of_the_private_kinds(tmp_path):
    file = tmp_path / "smaps_rollup"
    file.write_text("Rss: 90 kB\nPrivate_Clean:  3 kB\nPrivate_Dirty:  4 kB\nShared_Dirty: 9 kB\n")
    assert private_bytes(str(file)) == 7 << 10


@pytest.mark.parametrize(
    ("text", "expected"), [("RESOURCE_EXHAUSTED: 87 KiB", True), ("INTERNAL: a fault", False)]
)
def test_errors_for_want_of_memory_are_told_from_others(text, expected):
    assert is_of_memory(text) is expected


def write_status(folder, pid, anonymous, files, shared) -> None:
    (folder / str(pid)).mkdir()
    text = f"Name: x\nRssAnon: {anonymous} kB\nRssFile: {files} kB\nRssShmem:\t{shared} kB\n"
    (folder / str(pid) / "status").write_text(text)


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        (0, 60),  # 50 that the parent does not have, and 10 beside the backbone
        (-1e300, 60),
        (70 << 10, 70),
        (float("inf"), 115),
        (float("nan"), 60),
    ],
)
def test_what_a_process_says_counts_within_what_others_see(tmp_path, said, counted):
    write_status(tmp_path, 7, 80, 25, 40)
    write_status(tmp_path, 1, 30, 9, 0)
    given = said, 7, 1, 30 << 10, str(tmp_path)
    assert bounded_private_bytes(*given) == counted << 10


def test_without_its_parent_a_process_has_all_of_its_memory_alone(tmp_path):
    write_status(tmp_path, 7, 80, 25, 0)
    assert bounded_private_bytes(0, 7, 1, 0, str(tmp_path)) == 80 << 10


def test_a_process_that_has_ended_holds_nothing_and_a_hidden_one_what_it_says(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    assert bounded_private_bytes(1e18, process.pid, 1, 0) == 0
    assert bounded_private_bytes(9, os.getpid(), 1, 0, str(tmp_path)) == 9


HOLDS = """
import ctypes, sys
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
block = b"x" * (64 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_may_not_be_traced_is_seen_all_the_same():
    """As a function: the sizes of its maps are not for others of its user."""
    command = [sys.executable, "-c", HOLDS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        least = bounded_private_bytes(0, process.pid, os.getpid(), 0)
        most = bounded_private_bytes(1e18, process.pid, os.getpid(), 0)
        process.stdin.close()
    assert 64 << 20 <= most < 256 << 20
    assert least <= most
