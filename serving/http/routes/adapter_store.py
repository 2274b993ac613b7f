"""Loading and unloading adapters for clients: three APIs, one registry, confined to --lora-dir."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator

from fastapi import Request

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter
from lora_jax.adapters.registry import AdapterExists, AdapterNotFound, Recorded, RegistryBusy
from lora_jax.adapters.registry_errors import AdapterRejected
from lora_jax.adapters.versions import FULL_NAME, check_name, split
from serving.adapters.journal import Loaded
from serving.http.access.auth import caller_of, require_admin
from serving.http.errors import ApiError, from_exception, scrub
from serving.http.server import Server, server_of

logger = logging.getLogger(__name__)


def admin_server(request: Request) -> Server:
    """Return the server if this request may change its adapters, else raise ApiError 403."""
    require_admin(request)
    server = server_of(request)
    if not server.settings.enable_runtime_lora:
        raise ApiError(
            403, "Loading adapters over HTTP is off; the server needs --enable-runtime-lora."
        )
    return server


@contextlib.asynccontextmanager
async def audited(request: Request, action: str, adapter: str) -> AsyncGenerator[None]:
    """Write a line to the audit log about what is done inside, with its status."""
    status, audit = 500, server_of(request).audit
    try:
        yield
        status = 200
    except ApiError as error:
        status = error.status
        raise
    finally:
        request.scope["state"]["adapter"] = shown = (
            adapter if FULL_NAME.fullmatch(adapter) else None
        )
        audit.write(
            action,
            key=caller_of(request).id,
            adapter=shown,
            status=status,
            request_id=request.scope["state"]["request_id"],
        )


async def load(
    server: Server, name: str, path: str, *, replace: bool = False, pinned: bool = False
) -> AdapterEntry:
    """Load `--lora-dir/path` under a name and return its entry.

    Raises ApiError 400 (bad name, path or files, name taken), 404 (no such folder) or 503 (busy,
    or it cannot be recorded); then all stays as it was.
    """
    if server.engine.config.lora_dir is None:
        raise ApiError(400, "Loading adapters over HTTP needs --lora-dir.", type="InvalidUserInput")
    if server.names.is_base(split(name)[0]):
        why = f"The name {split(name)[0]!r} is the base model's."
        raise ApiError(400, why, type="InvalidUserInput")
    try:
        check_name(name)
    except AdapterRejected as error:
        raise ApiError(400, str(error), type="InvalidUserInput") from None
    if not path or "\0" in path:
        why = "lora_path must not be empty, and not contain a NUL character."
        raise ApiError(400, why, type="InvalidUserInput")
    registry = server.engine.registry
    try:
        async with server.changing:
            options = {"replace": replace, "pinned": pinned, "recorded": _recorded(server, path)}
            entry = await asyncio.to_thread(registry.load, name, path, confined=True, **options)
    except AdapterExists:
        raise ApiError(
            400,
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True.",
            type="InvalidUserInput",
        ) from None
    except AdapterNotFound:
        why = f"No adapter found at {shown_path(path)!r}: lora_path is a folder below --lora-dir."
        raise ApiError(404, why) from None
    except RegistryBusy as error:
        raise from_exception(error) from None
    except ValueError as error:
        raise ApiError(400, scrub(str(error)), type="InvalidUserInput") from None
    logger.info("Loaded adapter %s, sha256 %s.", name, entry.digest[:12])
    return entry


def _recorded(server: Server, path: str) -> Recorded:
    """Return a context in which an adapter is published: its load is on the disk before.

    It raises ApiError 503 where that fails.
    """

    @contextlib.contextmanager
    def record(entry: AdapterEntry) -> Iterator[None]:
        if server.journal is None:
            yield
            return
        loaded = Loaded(path, entry.digest, entry.pinned)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(server.journal.loading(entry.name, loaded))
            except (OSError, ValueError) as error:
                raise _not_recorded(error) from None
            yield

    return record


async def _record(write: Callable[..., None], *change: object) -> None:
    try:
        await asyncio.to_thread(write, *change)
    except (OSError, ValueError) as error:
        raise _not_recorded(error) from None


def _not_recorded(error: Exception) -> ApiError:
    """Log why the journal cannot be written, and return the error of the request."""
    logger.error("The journal of adapters cannot be written: %s", error)
    return ApiError(
        503,
        "The server cannot record this change, so it would not outlast this process; all stays as "
        f"it was: {getattr(error, 'strerror', None) or 'its journal is broken'}.",
    )


def durability(server: Server) -> str:
    """Return what an answer to a load says of how long it lasts; nothing when it is kept."""
    if server.journal is not None and server.journal.is_lasting:
        return ""
    return " It lasts until the server ends; --state-dir keeps it."


def remarks(server: Server, entry: AdapterEntry | EvictedAdapter) -> str:
    """Return what an answer to a load adds: the adapter's warnings, and how long it lasts."""
    warnings = (f" Warning: {scrub(text)}" for text in entry.report.warnings)
    return "".join(warnings) + durability(server)


def shown_path(path: str) -> str:
    """Return what may be said of a path in an answer: a relative one as it is."""
    return scrub(path[:200])


async def unload(server: Server, name: str) -> AdapterEntry | EvictedAdapter | None:
    """Forget an adapter and return its entry, None for one of the journal that is not served.

    Running requests finish.
    Raises ApiError 404 for one that is not known and 400 for a version with a share.
    """
    try:
        async with server.changing:
            server.engine.rollouts.check_unload(name)
            registry = server.engine.registry
            is_there = registry.knows(name) or name in registry.refused
            if server.journal is not None and is_there:
                await _record(server.journal.unloaded, name)  # or it stays: the answer is an error
            entry = await asyncio.to_thread(registry.unload, name)
    except AdapterNotFound:
        raise ApiError(404, f"The lora adapter '{name[:64]}' cannot be found.") from None
    except ValueError as error:
        raise ApiError(400, str(error), type="InvalidUserInput") from None
    digest = "none: it was not served" if entry is None else entry.digest[:12]
    logger.info("Unloaded adapter %s, sha256 %s.", name, digest)
    return entry


def adapter_id(name: str) -> int:
    """Return a stable positive 31-bit id of a name, for clients that want a number."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") & 0x7FFFFFFF
