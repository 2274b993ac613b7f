"""Model names: maps a client's name to the base model or an adapter, loaded on demand."""

import asyncio
import dataclasses
import os
from typing import Any

from lora_jax.adapters.composition import parts_of, versions_in
from lora_jax.adapters.reader import CONFIG_FILES
from lora_jax.adapters.registry import AdapterEntry, AdapterNotFound, RegistryBusy
from lora_jax.adapters.task_head import TaskHead
from lora_jax.adapters.versions import FULL_NAME, NAME, joined
from serving.http.access.keys import Caller
from serving.http.errors import ApiError, scrub, unknown_model
from serving.http.interface import AbstractEngine
from serving.http.requests.adapter_turn import IsGone, entry_in_turn, never


@dataclasses.dataclass(frozen=True)
class Target:
    """Target of a request: the name in its answer, and the adapter (None: the base).

    `adapter` names the version, where a rollout has chosen one. `entry` holds the adapter's
    weights until the engine has them.
    """

    name: str
    adapter: str | None
    entry: AdapterEntry | None = dataclasses.field(default=None, compare=False)

    @property
    def version(self) -> str | None:
        """The version of the adapter, or those of a sum's parts; None where none has one."""
        return versions_in(self.adapter or "")


class ModelNames:
    """The base model's names and the adapters a caller can see."""

    def __init__(self, engine: AbstractEngine, served_names: tuple[str, ...] = ()):
        """The first served name is the base model's id in answers; all of them lead to it."""
        self._engine = engine
        self.listed = served_names or (engine.config.model_name,)
        self.base = self.listed[0]
        # Not the folder that the model came from: that would tell where it is.
        self._accepted = frozenset(self.listed)

    def is_base(self, name: str) -> bool:
        """Return whether the name is one of the base model's."""
        return name in self._accepted

    def visible_adapters(self, caller: Caller) -> list[str]:
        """Return loaded adapters and those in the adapter folder, as far as the caller may see."""
        names = {entry.name for entry in self._engine.registry.known()}
        names.update(self._engine.rollouts.states())
        names.update(folder_adapters(self._engine.config.lora_dir))
        return sorted(n for n in names if caller.may_use(n) and not self.is_base(n))

    def sees_adapter(self, name: str, caller: Caller) -> bool:
        """Return whether `visible_adapters` would list this name, without listing all."""
        if self.is_base(name) or not caller.may_use(name):
            return False
        root = self._engine.config.lora_dir
        if self._engine.registry.knows(name) or name in self._engine.rollouts.states():
            return True
        return root is not None and is_adapter_folder(os.path.realpath(root), name)

    def heads(self) -> dict[str, TaskHead]:
        """Return the task heads of loaded adapters, by the adapter's name.

        A name that follows a rollout has the head of its versions, if they have the same one.
        """
        known = self._engine.registry.known()
        heads = {e.name: e.report.head for e in known if e.report.head is not None}
        for name, state in self._engine.rollouts.states().items():
            heads.pop(name, None)  # of a plain adapter, which answers no request now
            first, *others = (heads.get(joined(name, version)) for version in state.now.served)
            if first is not None and all(other == first for other in others):
                heads[name] = first
        return heads

    async def resolve(
        self,
        model: str | None,
        lora_path: str | None,
        caller: Caller,
        session: str = "",
        *,
        param: str | None = None,
        lends: bool = True,
        is_gone: IsGone = never,
    ) -> Target:
        """Return what `model` (name or base:name) and `lora_path` (name) ask for.

        A rollout of the name chooses the version by `session`. A name with a version needs the
        caller's permission for that very name; one that follows the rollout needs its own.
        Where adapters in use take all host memory it waits. With `lends` the adapter's weights
        count as in use while the target is held. ClientDisconnect: the client left meanwhile.
        Raises ApiError 404 for a name that does not exist or is hidden from the caller, and 400
        when the two name different adapters or the adapter's files are not acceptable; `param` is
        the field that named it, where it was none of these two.
        """
        by_model = self._adapter_of(model)
        adapter = by_model or lora_path or None
        if adapter is None:
            return Target(self.base, None)
        if by_model and lora_path and by_model != lora_path:
            raise ApiError(
                400,
                f"model names the adapter `{by_model[:64]}` and lora_path `{lora_path[:64]}`.",
                param="lora_path",
            )
        param = param or ("model" if by_model else "lora_path")
        shown = model if by_model and model else adapter
        if not FULL_NAME.fullmatch(adapter) or not caller.may_use(adapter):
            raise unknown_model(shown, param)
        try:
            chosen = self._engine.rollouts.pick(adapter, session)
            share = caller.host_share
            how = {"lends": lends, "is_gone": is_gone}
            entry = await entry_in_turn(self._engine, chosen, share, **how)
        except AdapterNotFound:
            if chosen != adapter:
                why = f"The version {chosen!r} has a share of {adapter!r} and is not loaded."
                raise ApiError(503, why, param=param) from None
            raise unknown_model(shown, param) from None
        return Target(adapter, chosen, entry)

    async def resolve_sum(
        self,
        given: list[Any],
        model: str | None,
        lora_path: str | None,
        caller: Caller,
        key: str,
        *,
        is_gone: IsGone = never,
    ) -> Target:
        """Return what a weighted sum of adapters asks for; `model` is the base model's name.

        Raises ApiError as `resolve` does, and 400 for parts that cannot be composed.
        """
        try:
            parts = parts_of(given)
        except ValueError as error:
            raise ApiError(400, str(error), param="adapters") from None
        if lora_path or (model and not self.is_base(model)):
            raise ApiError(
                400,
                "model or lora_path names an adapter, and so do adapters: put all parts into "
                f"adapters, and {self.base!r} or nothing into model.",
                param="adapters",
            )
        weighted = []
        for part in parts:
            if self.is_base(part.name):
                raise ApiError(400, "adapters names the base model.", param="adapters")
            # Not held: two sums that each hold a part would wait for each other's room.
            how = {"param": "adapters", "lends": False, "is_gone": is_gone}
            target = await self.resolve(part.name, None, caller, key, **how)
            if target.entry is not None:  # it is not the base model's
                weighted.append((target.entry, part.weight))
        try:
            entry = await asyncio.to_thread(self._engine.compose, weighted)
        except RegistryBusy:
            raise
        except ValueError as error:
            raise ApiError(400, scrub(str(error)), param="adapters") from None
        is_plain = len(parts) == 1 and parts[0].weight == 1
        return Target(parts[0].name if is_plain else model or self.base, entry.name, entry)

    def _adapter_of(self, model: str | None) -> str | None:
        """Return the adapter a model name asks for, or None for the base model."""
        if not model or self.is_base(model):
            return None
        base, colon, adapter = model.rpartition(":")
        return adapter if colon and self.is_base(base) and adapter else model


def folder_adapters(root: str | None) -> set[str]:
    """Return the names of the folders in `root` that look like adapters and are not elsewhere."""
    if root is None:
        return set()
    top = os.path.realpath(root)
    try:
        names = os.listdir(top)
    except OSError:
        return set()
    return {name for name in names if is_adapter_folder(top, name)}


def is_adapter_folder(top: str, name: str) -> bool:
    """Return whether `top/name` holds an adapter's config and is not a link to elsewhere."""
    if not NAME.fullmatch(name):
        return False
    folder = os.path.join(top, name)
    inside = os.path.realpath(folder).startswith(top + os.sep)
    return inside and any(os.path.isfile(os.path.join(folder, name)) for name in CONFIG_FILES)
