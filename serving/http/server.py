"""What the routes share: the engine, the settings, the keys, the names and the counters."""

import dataclasses
import time

from fastapi import Request

from serving.http.audit import AuditLog
from serving.http.interface import AbstractEngine
from serving.http.keys import KeyRing
from serving.http.mailbox import Mailbox
from serving.http.model_names import ModelNames
from serving.http.observe import HttpMetrics
from serving.http.settings import HttpSettings


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

    @classmethod
    def build(cls, engine: AbstractEngine, settings: HttpSettings) -> "Server":
        """Return a server whose names are those of the engine and of the settings."""
        names = ModelNames(engine, settings.served_names)
        keys, metrics = KeyRing(settings), HttpMetrics()
        audit = AuditLog(settings.audit_log)
        return cls(engine, settings, keys, names, metrics, Mailbox(), audit, int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that the model takes."""
        return self.engine.model_info.max_model_len


def server_of(request: Request) -> Server:
    """Return the server that a request came to."""
    return request.app.state.server
