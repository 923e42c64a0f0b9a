"""Verdicts: what the trials of the last grammars said (standard library only)."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

COSTLY_S = 60.0
"""Seconds for which a refusal for CPU time, memory or slow masks is remembered.

The next trial may end otherwise, for example on a machine that is less busy.
"""


class Verdicts:
    """The verdicts on the last grammars. Those that depend on the machine are kept for a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, tuple[dict[str, Any], float]] = OrderedDict()

    def get(self, key: bytes) -> dict[str, Any] | None:
        verdict, until = self._kept.get(key, (None, 0.0))
        if verdict is None or until < time.monotonic():
            return None
        self._kept.move_to_end(key)
        return verdict

    def keep(self, key: bytes, verdict: dict[str, Any]) -> None:
        costly = verdict.get("costly", False)
        self._kept[key] = verdict, time.monotonic() + COSTLY_S if costly else float("inf")
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
