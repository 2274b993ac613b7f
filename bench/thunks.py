"""Reads what XLA dumps of a compiled program: what the host starts, and what CUDA graphs hold."""

import re
from pathlib import Path

# The passes leave no file where they changed nothing.
_NAMES = ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")


def read_thunks(folder: Path) -> tuple[list[str], int]:
    """Return the kinds of the outermost thunks, and how many operations lie in command buffers.

    A command buffer is a CUDA graph. StopIteration: the folder has no dump of a GPU's program.
    """
    dump = next(path for name in _NAMES for path in folder.glob(name))
    lines = re.findall(r"^( *)\d+: (k\w+)", dump.read_text(), re.MULTILINE)
    outer = [kind for indent, kind in lines if not indent]
    inside, buffer_depth = 0, None
    for indent, kind in lines:
        if buffer_depth is not None and len(indent) > buffer_depth:
            inside += 1
            continue
        buffer_depth = len(indent) if kind == "kCommandBuffer" else None
    return outer, inside
