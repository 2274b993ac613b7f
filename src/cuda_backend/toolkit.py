"""The CUDA compilers of this machine: the toolkit's on the path, pip's wheels, the usual folder.

`pip install 'lora-jax[cuda]'` installs nvcc with jax (nvidia/cu13/bin/nvcc in site-packages), so
that no toolkit of the system is needed. A host compiler (g++) is.
"""

import importlib.util
import shutil
from pathlib import Path

from lora_jax.ops.native import Compiler

WANTED = "nvcc (on the path, of the package nvidia-cuda-nvcc, or in /usr/local/cuda)"
USUAL_FOLDER = Path("/usr/local/cuda/bin")


def find_compilers() -> tuple[Compiler, ...]:
    """Return every nvcc, the preferred one first: on the path, of pip, in /usr/local/cuda."""
    compilers = (_on_path(), *_in_site_packages(), _in_usual_folder())
    by_file = {Path(c.path).resolve(): c for c in reversed(compilers) if c is not None}
    return tuple(reversed(by_file.values()))


def _on_path() -> Compiler | None:
    path = shutil.which("nvcc")
    return Compiler(path) if path else None


def _in_usual_folder() -> Compiler | None:
    path = shutil.which("nvcc", path=str(USUAL_FOLDER))
    return Compiler(path) if path else None


def _in_site_packages() -> tuple[Compiler, ...]:
    """Return the compilers of nvidia-cuda-nvcc, whose profile does not name the wheels' lib."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations if spec else None) or ()
    folders = [folder for place in places for folder in Path(place).glob("cu[0-9]*/bin")]
    paths = [path for folder in folders if (path := shutil.which("nvcc", path=str(folder)))]
    return tuple(Compiler(path, (f"-L{Path(path).parents[1] / 'lib'}",)) for path in paths)
