"""Fails where a test calls with arguments that are not taken, or imports what is not there.

Part of `make lint`: tests for GPUs and slow ones run too rarely to say so themselves. The rest of
what pyright says of tests is left out: doubles and unpacked tuples are more than it can follow.
"""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
CERTAIN = ("No parameter named", "Argument missing", '" is unknown import symbol')
# Calls a release of triton that only its own Python has.
OTHERS = (TESTS / "kernels" / "npu_backend" / "triton_ascend.py",)


def main() -> int:
    """Print each such place; return 1 where there is one."""
    pyright = str(Path(sys.executable).with_name("pyright"))
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, str(TESTS)]
    said = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    found = json.loads(said.stdout)["generalDiagnostics"]
    wrong = [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in found
        if any(part in one["message"] for part in CERTAIN) and Path(one["file"]) not in OTHERS
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
