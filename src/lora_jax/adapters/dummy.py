"""Adapters of random weights, made from adapter_config.json alone, to measure speed with. No jax.

The counterpart of models.dummy. What is placed, copied and computed is what it would be with files;
but all adapters of one shape share one block of random bytes, so that hundreds of them need no more
host memory than one, and nothing is read or hashed but their configs. They count as so many bytes
as if each had its own.
"""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lora_jax.adapters import reader
from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.file_layouts import FileLayouts
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.reader import AdapterReadLimits
from lora_jax.adapters.target_modules import check_open
from lora_jax.adapters.weights import AdapterWeights, AnyWeights, SiteWeights

_BANK_VALUES = 1 << 28  # half a gigabyte: more than a CPU's caches hold
_SIGN_AND_MANTISSA, _EXPONENT = 0x807F, 121 << 7  # bfloat16: 2^-6 to 2^-5, either sign


class DummyAdapters:
    """Reads adapter folders as `reader.read` does, and makes up the weights that are not there."""

    def __init__(self, bank_values: int = _BANK_VALUES):
        self._bank_values = bank_values
        self._layouts = FileLayouts()
        self._bank: Any = None
        self._blocks: dict[tuple, AdapterWeights] = {}  # by the shapes of an adapter's matrices
        self._lock = threading.Lock()

    def read(
        self,
        path: Path,
        catalogue: LoraCatalogue,
        *,
        base_names: tuple[str, ...] = (),
        limits: AdapterReadLimits | None = None,
        root: Path | None = None,
    ) -> AnyWeights:
        """Return the adapter in a folder; one of a config alone has matrices of bfloat16.

        It changes every site whose module's last name is among its target_modules. Raises as
        `reader.read` does.
        """
        folder = AdapterFolder(path, root)
        if folder.files() != (peft_format.CONFIG_FILE,):
            given = {"limits": limits, "root": root, "layouts": self._layouts}
            return reader.read(path, catalogue, base_names=base_names, **given)
        config, matrices = peft_format.read_config(folder), _Matrices(self._random())
        sites = {
            (module.name, layer): matrices.site(module, config)
            for module in catalogue.of_base.values()
            for layer in module.layers
            if module.name.rpartition(".")[2] in config.target_modules
        }
        if not sites:
            raise ValueError(f"{peft_format.CONFIG_FILE}: no target module is one of the model's.")
        check_open(sites, catalogue)
        peft_format.check_ranks(sites, (limits or AdapterReadLimits()).max_rank)
        report = peft_format.make_report(folder, sites, config, 2 * len(sites), ())
        return self._in_shared_block(AdapterWeights(sites, report))

    def _in_shared_block(self, made: AdapterWeights) -> AdapterWeights:
        """Return the adapter with the matrices of the first one of its shape, which are one block.

        A host pins a block once, and copies it to the device as one.
        """
        shapes = tuple((key, one.a.shape, one.b.shape) for key, one in made.sites.items())
        with self._lock:
            if shapes not in self._blocks:
                self._blocks[shapes] = made.in_one_block()
            block = self._blocks[shapes].sites
        sites = {
            key: SiteWeights(block[key].a, block[key].b, one.scaling)
            for key, one in made.sites.items()
        }
        return dataclasses.replace(made, sites=sites)

    def _random(self) -> np.ndarray:
        """Return the bank, bfloat16 [values], made at its first use."""
        with self._lock:
            if self._bank is None:
                raw = np.random.default_rng(0).integers(0, 1 << 16, self._bank_values, np.uint16)
                np.bitwise_and(raw, _SIGN_AND_MANTISSA, out=raw)
                np.bitwise_or(raw, _EXPONENT, out=raw)
                self._bank = raw.view(ml_dtypes.bfloat16)
            return self._bank


@dataclasses.dataclass
class _Matrices:
    """Cuts an adapter's matrices out of the bank, one behind the other and then from its start."""

    bank: np.ndarray
    used: int = 0

    def site(self, module: LoraModule, config: PeftConfig) -> SiteWeights:
        rank, count = config.rank_of(module.name), max(module.num_experts, 1)
        a, b = (self._next((count, rank, width)) for width in (module.d_in, module.d_out))
        return SiteWeights(a, b, config.scaling_of(module.name, rank))

    def _next(self, shape: tuple[int, int, int]) -> np.ndarray:
        size = int(np.prod(shape))
        if size > len(self.bank):
            raise ValueError(f"A matrix {shape} is larger than the bank of random values.")
        if self.used + size > len(self.bank):
            self.used = 0
        self.used += size
        return self.bank[self.used - size : self.used].reshape(shape)
