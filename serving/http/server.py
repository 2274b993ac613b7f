"""State that the routes share: engine, settings, keys, names and counters."""

import asyncio
import dataclasses
import time

from fastapi import Request

from serving.adapters.journal import Journal
from serving.http.access.audit import AuditLog
from serving.http.access.keys import KeyRing
from serving.http.access.observe import HttpMetrics
from serving.http.interface import AbstractEngine
from serving.http.requests.model_names import ModelNames
from serving.http.settings import HttpSettings
from serving.runtime.mailbox import Mailbox


@dataclasses.dataclass(frozen=True, eq=False)
class Server:
    """One HTTP server over one engine."""

    engine: AbstractEngine
    settings: HttpSettings
    keys: KeyRing
    names: ModelNames
    metrics: HttpMetrics
    mailbox: Mailbox
    audit: AuditLog
    created: int  # unix time
    journal: Journal | None = None  # of loads at run time
    changing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)  # one load at a time

    @classmethod
    def build(
        cls,
        engine: AbstractEngine,
        settings: HttpSettings,
        journal: Journal | None = None,
        keys: KeyRing | None = None,
    ) -> "Server":
        """Return a server whose names are those of the engine and of the settings."""
        names = ModelNames(engine, settings.served_names)
        keys, metrics = keys or KeyRing(settings), HttpMetrics()
        audit = AuditLog(settings.audit_log)
        now = int(time.time())
        return cls(engine, settings, keys, names, metrics, Mailbox(), audit, now, journal)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that the model takes."""
        return self.engine.model_info.max_model_len


def server_of(request: Request) -> Server:
    """Return the server that a request came to."""
    return request.app.state.server
