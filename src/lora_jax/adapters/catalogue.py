"""Catalogue of the linear maps that adapters may change, and of their names in files.

A *module* is one kind of linear map ("q_proj", "experts.gate_proj"); a *site* is a module in one
layer. Models build a catalogue; the readers of adapter files resolve names against it. No jax.
"""

import dataclasses
import functools
import re
from collections.abc import Collection

UNQUANTISED = "none"  # LoraCatalogue.quantization
OUTPUTS, EXPERTS, WHOLE = "outputs", "experts", "whole"  # LoraModule.split
EXPERT_MODULES = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


@dataclasses.dataclass(frozen=True)
class LoraModule:
    """One kind of linear map: y = x W^T with W [d_out, d_in], in each of `layers`.

    `num_experts` > 0 means one W per expert. MLA's absorbed kv_b_proj also uses this: a head is an
    expert there. `split` is what the devices of a split model share: its outputs, its experts, or
    nothing, each having the module whole. `most_rank` bounds the rank on this module where it is
    not the engine's: a task head has a rank row per label.
    """

    name: str
    d_in: int
    d_out: int
    layers: tuple[int, ...]
    num_experts: int = 0
    split: str = OUTPUTS
    most_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class NameRule:
    """A file's spelling of module paths.

    `pattern` is matched in full against a module path such as `model.layers.3.self_attn.q_proj`
    and has a group `layer`, and a group `expert` where a path names one expert. `module` names
    the LoraModule, or is None for a path that is refused, with `why`. A path may stand for
    several modules (fused on disk): `split` then gives the module names in the order in which
    their rows stand in B, e.g. DBRX's Wqkv -> (q_proj, k_proj, v_proj).
    """

    pattern: re.Pattern[str]
    module: str | None = None
    split: tuple[str, ...] = ()
    why: str = ""


@dataclasses.dataclass(frozen=True)
class LoraCatalogue:
    """All modules of one base model, with the file spellings that lead to them."""

    model_type: str
    num_layers: int
    modules: dict[str, LoraModule]
    rules: tuple[NameRule, ...]
    interleaved_gate_up: bool = False  # GPT-OSS: gate and up alternate on the output axis
    # MLA: (heads, qk_nope_head_dim, v_head_dim) of kv_b_proj, which the step applies absorbed.
    kv_b_heads: tuple[int, int, int] | None = None
    quantization: str | None = None  # format of the base's weights; None: not said
    tied_head: bool = False  # lm_head is the embedding; told where adapters may bring rows of them
    most_saved: int = 0  # whole embeddings and heads of all adapters on the device
    only_lora: str = ""  # option with which adapters bring nothing but LoRA; "": they may
    # Modules of the base model that no adapter of this engine may change with LoRA; see `only`.
    closed: dict[str, LoraModule] = dataclasses.field(default_factory=dict)

    @property
    def widths(self) -> tuple[int, ...]:
        """Distinct vector widths; adapter slots keep one pool of rank rows per width."""
        return tuple(sorted({w for m in self.modules.values() for w in (m.d_in, m.d_out)}))

    @property
    def of_base(self) -> dict[str, LoraModule]:
        """All modules of the base model, those that are closed to LoRA too."""
        return self.modules | self.closed

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of all modules, sorted: the order in which slots have them."""
        return tuple(sorted(self.modules))

    def what_to_change(self, room: str) -> str:
        """Return how a server is started that takes what there is no room for; `room` is a flag."""
        if self.only_lora:
            return f"that does not go with {self.only_lora}. Start one without it, with {room}"
        return f"start it with {room}"

    def only(self, names: Collection[str]) -> "LoraCatalogue":
        """Return the catalogue in which adapters may change these modules alone."""
        kept = {name: module for name, module in self.modules.items() if name in names}
        closed = {name: module for name, module in self.of_base.items() if name not in kept}
        return dataclasses.replace(self, modules=kept, closed=closed)

    def opened(self) -> "LoraCatalogue":
        """Return the catalogue without what `only` took, to read files that may have LoRA on it.

        It is the same object at every call: layouts of files that were read go by it.
        """
        return self._opened if self.closed else self

    @functools.cached_property
    def _opened(self) -> "LoraCatalogue":
        return dataclasses.replace(self, modules=self.of_base, closed={})

    def without_experts(self) -> "LoraCatalogue":
        """Return the catalogue of all modules but the experts'."""
        kept = {name: m for name, m in self.modules.items() if name not in EXPERT_MODULES}
        return dataclasses.replace(self, modules=kept)
