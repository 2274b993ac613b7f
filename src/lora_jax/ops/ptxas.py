"""Reports of NVIDIA's assembler on Mosaic GPU kernels, read while a program is compiled.

Registers that do not suffice are spilled to memory: no error, but slower than other tiles.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from lora_jax.ops.environment import environment

# Of a function's properties: a warning may say the same besides.
SPILLED = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one kernel."""

    registers: int  # per thread
    spill_bytes: int  # stores and loads


@contextlib.contextmanager
def reports_in(folder: Path) -> Iterator[None]:
    """Let every kernel that this process compiles within leave what is said of it in `folder`."""
    dump = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(folder)}
    with environment(dump):
        yield


def read_reports(folder: Path) -> dict[str, Report]:
    """Return the reports that lie in `folder`, by the kernels' names; none where none compiled."""
    reports = {}
    for file in sorted(folder.glob("*.ptxas")):
        text = file.read_text()
        registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
        spilled = [pair for one in re.findall(SPILLED, text) for pair in one]
        reports[file.stem] = Report(registers, sum(map(int, spilled)))
    return reports
