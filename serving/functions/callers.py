"""Callers that a front has identified, on their way to a function, which knows no keys. No jax.

The front puts a caller's limits where the client's key was. Only the front can reach a function, so
a function believes it.
"""

import base64
import json

from serving.api.request import Share
from serving.http.access.keys import Caller, KeyRing, budget_of
from serving.http.access.rates import TokenBudget
from serving.http.settings import HttpSettings


def token_of(caller: Caller) -> str:
    """Return the caller as one word of a header."""
    share, budget = caller.share, caller.budget
    fields = {
        "id": caller.id,
        "salt": caller.salt,
        "weight": share.weight,
        "max_running": share.max_running,
        "max_waiting": share.max_waiting,
        "tokens_per_minute": budget.per_minute if budget else None,
    }
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


class CallerRing(KeyRing):
    """Reads `token_of`; without such a word nobody may use the model."""

    def __init__(self, budgets_folder: str | None):
        """Keys of one id share their tokens a minute with other functions by files in the
        folder."""
        super().__init__(HttpSettings())
        self.anonymous = Caller(uses_model=False)
        self._folder = budgets_folder
        self._budgets: dict[str, TokenBudget] = {}

    def check(self, key: str) -> tuple[Caller | None, str]:
        """Return the caller, or None and "unknown" for a word that no front has written."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(key))
            name, limits = fields["id"], (fields["max_running"], fields["max_waiting"])
            share = Share(name, fields["weight"], *limits)
            budget = self._budget(name, fields["tokens_per_minute"])
            return Caller(salt=fields["salt"], id=name, budget=budget, share=share), ""
        except (ValueError, KeyError, TypeError):
            return None, "unknown"

    def _budget(self, name: str, per_minute: float | None) -> TokenBudget | None:
        if per_minute is None:
            return None
        known = self._budgets.get(name)
        if known is None or known.per_minute != per_minute:
            self._budgets[name] = known = budget_of(name, per_minute, self._folder)
        return known
