"""How many of the engines' places are given out: fewer while the replicas are slower than their engines.

An engine that waits for its frontend (cfg_core/vllm_plugin/pace.py) gains nothing by more streams: the same tokens a
second are shared by more requests, and each takes longer. So the ingress gives out fewer places while the engines
wait for a good part of the time, and more again when they do not. Pure; the caller brings the time.
"""

from __future__ import annotations

LEAST = 0.25
FEWER, MORE = 0.85, 0.05
"""A factor, and a step, for each look."""

BUSY, CALM = 0.3, 0.1
"""Shares of the time that engines wait: above the one fewer places, below the other more."""

LOOK_EVERY_S = 1.5
"""Several reports of a replica."""


class Throttle:
    """`share`: of the places, LEAST to 1."""

    def __init__(self) -> None:
        self.share = 1.0
        self._last: tuple[float, float, int] | None = None  # now_s, held_s, replicas

    def observe(self, held_s: float, replicas: int, now_s: float) -> None:
        """held_s: for how long the engines have waited since they started, all replicas together."""
        if self._last is not None and now_s - self._last[0] < LOOK_EVERY_S:
            return
        last, self._last = self._last, (now_s, held_s, replicas)
        if last is None or last[2] != replicas or held_s < last[1] or not replicas:
            return  # a replica came or went, and its seconds with it
        held = (held_s - last[1]) / ((now_s - last[0]) * replicas)
        if held > BUSY:
            self.share = max(LEAST, self.share * FEWER)
        elif held < CALM:
            self.share = min(1.0, self.share + MORE)
