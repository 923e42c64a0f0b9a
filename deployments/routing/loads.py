"""How busy each replica is: its last report, and what was sent to it since."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any

from deployments.health.engine_watch import REPORTED_AT

REPORT_AGE_S = 0.5
"""Assumed age, in seconds, of a report that has no timestamp.

It is half a pulse of the engine (PULSE_S), a tick or two of Serve's controller, and the transfer.
Too large, and requests sent to the replica in that time are counted twice; too small, and they are
not counted at all.
"""

MAX_REPORT_AGE_S = 5.0
"""If a report seems older, in seconds, the clock of its machine is behind."""

PLANNED_S = 5.0
"""Seconds for which a choice counts before Serve says that the request was sent.

Serve never says so if the client left.
"""

ANSWERED_S = 60.0
"""Seconds for which an answered request is remembered: a report on its way may still count it."""

PREFILL_TOKENS_PER_S = 10_000
"""Assumed prefill speed of a replica that does not report it.

Too high a value does little harm. With too low a value, requests whose prefill is long done seem to
wait, and other requests avoid the replica, even if it holds their own prefixes.
"""


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """A replica's load: what it reported, and what this process did to it since.

    0 also stands for what is not known.

    queued_prefill_tokens: of prompts, not computed yet.
    running, waiting: streams.
    calls: calls of `generate` that the replica has taken since its start.
    prefill_tokens_per_s: may be missing in a report.
    waiting_tokens: how much should be left by now of the queued tokens and of those sent since.
    sent_blocks: KV blocks that the requests sent since need.
    sent_streams: streams of the requests sent since, less those answered since. It may be negative.
    last_sent: when the last request was sent, in seconds.
    """

    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    queued_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    calls: int = 0
    prefill_tokens_per_s: int = PREFILL_TOKENS_PER_S
    waiting_tokens: float = 0.0
    sent_blocks: int = 0
    sent_streams: int = 0
    last_sent: float = -math.inf

    @classmethod
    def of(cls, stats: Mapping[str, Any], **since: Any) -> ReplicaLoad:
        """Build the load from a report. Missing keys and invalid counts get the default.

        stats: what `ModelReplica.record_routing_stats` returned.
        since: the fields of SINCE.
        """
        known = {
            name: value
            for name in REPORTED
            if type(value := stats.get(name)) is int and value >= LEAST.get(name, 0)
        }
        return cls(**known, **since)

    @property
    def streams(self) -> int:
        return max(0, self.running + self.waiting + self.sent_streams)

    @property
    def headroom_blocks(self) -> int:
        """Free blocks that nobody needs soon: each running stream will take one more, too."""
        queued = math.ceil(self.queued_prefill_tokens / self.block_size)
        return self.free_blocks - self.sent_blocks - queued - self.running


SINCE = ("waiting_tokens", "sent_blocks", "sent_streams", "last_sent")
REPORTED = tuple(field.name for field in fields(ReplicaLoad) if field.name not in SINCE)
"""The keys of a replica's report, all with integer values."""

LEAST = {"block_size": 1, "prefill_tokens_per_s": 1}
"""Minimum of a reported count, where it is not 0."""


def report_age_s(stats: Mapping[str, Any], unix_time_s: float) -> float:
    """How many seconds ago the report was true. Clocks of two machines may differ by a little."""
    at_ms = stats.get(REPORTED_AT)
    if type(at_ms) is not int:
        return REPORT_AGE_S
    return min(max(0.0, unix_time_s - at_ms / 1000), MAX_REPORT_AGE_S)


# --- since the last report ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What one request asks of a replica: prefill tokens, KV blocks, streams.

    at: when it was sent, in seconds.
    reason: why the replica was chosen for it, if that is known.
    """

    tokens: int
    blocks: int = 0
    streams: int = 0
    at: float = -math.inf
    reason: str | None = None


class SentLedger:
    """What this process has sent to each replica and the replica's last report cannot include.

    Used from one thread, with one clock.
    """

    def __init__(self) -> None:
        # replica -> request -> work
        self._sent: defaultdict[Hashable, dict[str, Work]] = defaultdict(dict)
        # replica -> works, and when each was answered
        self._answered: defaultdict[Hashable, deque[tuple[Work, float]]] = defaultdict(deque)
        # request -> replica, work; the oldest plans come first
        self._planned: dict[str, tuple[Hashable, Work]] = {}
        # replica -> request -> work, the same
        self._plans: defaultdict[Hashable, dict[str, Work]] = defaultdict(dict)
        self._known_until: dict[Hashable, float] = {}
        self._last_sent: dict[Hashable, float] = {}

    def planned(self, replica: Hashable, request: str, work: Work) -> None:
        """Note that the request is about to be sent there.

        It counts at once, else requests that come together would all choose the same replica.
        """
        self.unplan(request)
        self._planned[request] = replica, work
        self._plans[replica][request] = work
        while self._planned:
            oldest, (_, plan) = next(iter(self._planned.items()))
            if work.at - plan.at <= PLANNED_S:
                break
            self.unplan(oldest)

    def reason(self, replica: Hashable, request: str) -> str | None:
        """Why the request was planned there; None if it was not, or too long ago."""
        planned, work = self._planned.get(request, (None, None))
        return work.reason if work is not None and planned == replica else None

    def unplan(self, request: str) -> None:
        if request in self._planned:
            replica, _ = self._planned.pop(request)
            plans = self._plans[replica]
            del plans[request]
            if not plans:
                del self._plans[replica]

    def sent(self, replica: Hashable, request: str, work: Work) -> None:
        self.unplan(request)
        self._sent[replica].pop(request, None)  # so that the newest come last
        self._sent[replica][request] = work
        self._last_sent[replica] = work.at

    def answered(self, replica: Hashable, request: str, now: float) -> None:
        """Note that the request, which need not be known, is done, or was refused there."""
        if self._planned.get(request, (None,))[0] == replica:
            self.unplan(request)
        work = self._sent.get(replica, {}).pop(request, None)
        if work:
            self._answered[replica].append((work, now))
            self._drop_answered(replica, now - ANSWERED_S)

    def reported(self, replica: Hashable, until: float) -> None:
        """Note that a report came, which includes what had happened by `until`."""
        self._known_until[replica] = until
        self._drop_answered(replica, until)

    def _drop_answered(self, replica: Hashable, before: float) -> None:
        answered = self._answered.get(replica)
        while answered and answered[0][1] <= before:
            answered.popleft()

    def forget(self, replica: Hashable) -> None:
        for request in list(self._plans.get(replica, ())):
            self.unplan(request)
        for table in (self._sent, self._answered, self._known_until, self._last_sent):
            table.pop(replica, None)

    def keep_only(self, replicas: Collection[Hashable]) -> None:
        for replica in {*self._known_until, *self._last_sent, *self._plans} - set(replicas):
            self.forget(replica)

    def unanswered(self, replica: Hashable) -> tuple[int, int]:
        """(tokens, requests) that were sent there and are not answered yet."""
        works = self._sent.get(replica, {}).values()
        return sum(work.tokens for work in works), len(works)

    def load(
        self, replica: Hashable, reported: ReplicaLoad, now: float, times: float = 1.0
    ) -> ReplicaLoad:
        """Bring `reported`, the last report, up to date.

        times: how often a request since the report counts: once, and for what other processes
        probably sent at the same time.
        """
        until = self._known_until.get(replica, -math.inf)
        sent = reversed(self._sent.get(replica, {}).values())
        new = list(takewhile(lambda work: work.at > until, sent))
        plans = self._plans.get(replica, {}).values()
        new += [plan for plan in plans if now - plan.at <= PLANNED_S]
        gone = sum(work.streams for work, _ in self._answered.get(replica, ()) if work.at <= until)
        return replace(
            reported,
            waiting_tokens=waiting_tokens(reported, until, new, now, times),
            sent_blocks=round(times * sum(work.blocks for work in new)),
            sent_streams=round(times * (sum(work.streams for work in new) - gone)),
            last_sent=self._last_sent.get(replica, -math.inf),
        )


def waiting_tokens(
    reported: ReplicaLoad, at: float, new: Iterable[Work], now: float, times: float = 1.0
) -> float:
    """How many tokens are left to prefill at `now`, at the replica's speed.

    They are what was queued at `at`, and `times` what came since (`new`).
    """
    left, speed = float(reported.queued_prefill_tokens), reported.prefill_tokens_per_s
    for work in sorted(new, key=lambda work: work.at):
        left = max(0.0, left - speed * (work.at - at)) + times * work.tokens
        at = work.at
    return max(0.0, left - speed * (now - at))
