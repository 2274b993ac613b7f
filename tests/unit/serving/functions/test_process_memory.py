"""Memory of a process of a function: its own bytes, and errors that mean a lack of it."""

import pytest

from serving.functions.process_memory import backbone_memory, is_of_memory, private_bytes

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
