"""Hook of hatchling's wheels: with LORA_JAX_PREBUILT=1 the C++ kernels are compiled into a wheel.

A wheel that has compiled kernels is one for its platform. Without the variable a wheel has those
that `python -m lora_jax.ops.cpu.prebuilt` has left beside the sources, or none: a machine then
compiles its own at the first start, for itself alone.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "LORA_JAX_PREBUILT"
KERNELS = Path("src", "lora_jax", "ops", "cpu")


class KernelsHook(BuildHookInterface):
    """Compiles the kernels, and names the platform of a wheel that has some."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make ready for a wheel; raises CalledProcessError when the kernels do not compile."""
        if version == "editable":  # the sources are not only a wheel's
            return
        root = Path(self.root)
        if _is_asked():
            self._remove()
            path = os.pathsep.join([str(root / "src"), *filter(None, sys.path)])
            subprocess.run(
                [sys.executable, "-m", "lora_jax.ops.cpu.prebuilt"],
                check=True,
                cwd=root,
                env={**os.environ, "PYTHONPATH": path},
            )
        if any((root / KERNELS).glob("*.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: beside the sources it would also be taken for them."""
        if version != "editable" and _is_asked():
            self._remove()

    def _remove(self) -> None:
        for old in Path(self.root, KERNELS).glob("*.so*"):
            old.unlink()


def _is_asked() -> bool:
    return os.environ.get(VARIABLE, "0") != "0"
