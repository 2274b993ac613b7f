"""Parts of a model runner: a model, its adapters, and the programs that it compiles."""

import dataclasses
from collections.abc import Set

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots, RowWriter
from lora_jax.kv_cache import KVShape, PagedKVCache
from lora_jax.sharding import Split
from serving.lora_server.sides import RemoteLink
from serving.steps.image_encoder import ImageEncoder
from serving.steps.kept_steps import KeptSteps
from serving.steps.merged_weights import MergedWeights
from serving.steps.sampling.mask_board import MaskBoard


@dataclasses.dataclass(frozen=True, eq=False)
class StepModel:
    """The model of a runner's steps, where it lies, and its KV pages."""

    model: nnx.Module
    kv_shape: KVShape  # of all heads, on however many devices
    vocab_size: int
    dtype: jnp.dtype  # of KV pages
    end_ids: tuple[int, ...] = ()  # tokens that are held back before a request's min_tokens
    split: Split | None = None  # the devices of the model and of the adapter slots
    encoder: ImageEncoder | None = None  # of a model that takes images
    pooled: PagedKVCache | None = None  # KV pages of a page pool; None: the runner makes its own


@dataclasses.dataclass(frozen=True, eq=False)
class StepAdapters:
    """What rows of a step may add to the model."""

    slots: AdapterSlots | None = None  # of LoRA; with a page pool their rows are the pool's
    bringing: Set[int] = frozenset()  # slots of adapters with more than LoRA; the caller changes it
    row_writer: RowWriter = "programs"  # without a page pool
    reroute_tables: np.ndarray | None = None  # of ESFT, if the model has expert tensors
    link: RemoteLink | None = None  # to the LoRA Server of the experts' part
    merged: MergedWeights | None = None  # weights that steps may take in place of the model's
    mixture: bool = False  # whether steps on merged weights may have rows of other adapters

    @property
    def num_esft(self) -> int:
        """Slots of ESFT adapters."""
        return 0 if self.reroute_tables is None else self.reroute_tables.shape[1]

    @property
    def brings(self) -> bool:
        """True if an adapter may have more than LoRA."""
        return self.slots is not None and self.slots.token_ids is not None


NO_ADAPTERS = StepAdapters()


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramChoice:
    """Which programs a runner compiles."""

    max_tokens: int  # of a step
    base_only: bool = False  # once more without LoRA, for steps whose rows have none
    structured_outputs: bool = True  # those of steps whose rows may be masked
    board: MaskBoard | None = None  # where masked steps wait for their masks; None: none waits
    in_place: bool | None = None  # as CompiledStep has it; None: not on a CPU
    kept: KeptSteps | None = None  # compiled steps of earlier processes

    @property
    def mask_board(self) -> MaskBoard | None:
        """The board, if any step is masked."""
        return self.board if self.structured_outputs else None

    @property
    def is_in_place(self) -> bool:
        """`in_place`, or what is right for this process's devices."""
        return jax.default_backend() != "cpu" if self.in_place is None else self.in_place
