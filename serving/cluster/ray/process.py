"""The handle of a role's process that an actor of Ray has started on its host."""

import contextlib
import signal
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from serving.cluster.far.process import AbstractActorProcess

_ANSWER_S = 1.0


class RayProcess(AbstractActorProcess):
    """One start of a role; the kernel ends its process with Ray's actor."""

    def __init__(
        self,
        actor: Any,
        payload: bytes,
        environ: Mapping[str, str],
        ended: Callable[[bool], None],
    ):
        """See AbstractActorProcess."""
        super().__init__(ended)
        self._actor, self._payload, self._environ = actor, payload, environ

    def is_at_work(self) -> bool:
        """See AbstractFarProcess."""
        try:
            return ray.get(self._actor.is_at_work.remote(), timeout=_ANSWER_S)
        except RayError:
            return False

    def _begin(self) -> Any:
        return self._actor.run.remote(self._payload, self._environ)

    def _status(self, running: Any) -> int:
        try:
            status: Any = ray.get(running)
        except RayError:
            return -signal.SIGKILL
        return status

    def _end_actor(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)
