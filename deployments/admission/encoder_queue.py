"""The admission queue in front of the replicas of one encoder.

The policy is that of the generator's queue (queue.py). What is a stream there is a token here. The
engines of encoders let tenants take turns inside (cfg_core/prefill_only/stages/fair_queue.py). So
the queue need not keep a tenant's large request from starting: it bounds how many requests of each
tenant are in the engines, and what waits.
"""

from __future__ import annotations

from collections.abc import Callable

from cfg_core.prefill_only.models.checkpoint import ModelInfo
from deployments.admission.entries import Share
from deployments.admission.queue import AdmissionQueue, Place
from deployments.config.encoders import EncoderArgs
from deployments.requests.demand import Demand

BATCHES = 16
"""Full batches of estimated tokens that each replica has, so that it always has the next ready.

It is enough to choose texts of similar length from.
"""
MOST_OF_ONE_REQUEST = 1 / 4
"""The share of a replica's tokens that one request counts at most, however large it is.

A larger request has a place, too: the engine computes it in turn with others.
"""

TOLD = ("queued_requests", "queued_tokens")
"""What /metrics tells of the queue, by the names of AdmissionQueue.stats."""


class EncoderQueue:
    """The queue in front of the replicas of one encoder. Used from one event loop.

    info: of the encoder's model. replicas: returns how many replicas run, at least one.
    max_share: of the engines' tokens, for one tenant while another one is active.
    """

    def __init__(
        self,
        args: EncoderArgs,
        info: ModelInfo,
        max_share: float,
        replicas: Callable[[], int],
    ) -> None:
        self._per_replica = BATCHES * info.max_batch_tokens
        self._least = max(1, self._per_replica // args.requests_per_replica)
        self._replicas = replicas
        self._queue = AdmissionQueue(
            self._capacity,
            info.max_queued_tokens,
            info.max_queued_tokens,
            most_of_one=lambda: int(max_share * self._capacity()),
            one_for_each=True,
            reason="encoder_queue",
        )

    async def enter(self, share: Share, work: int) -> Place:
        """Wait for a place with the engines, which the caller must `leave`.

        work: estimated, in tokens. Raises OverloadedError if there is no room to wait.
        """
        most = max(self._least, int(MOST_OF_ONE_REQUEST * self._per_replica))
        place = await self._queue.enter(
            share, Demand(streams=min(most, max(self._least, work)), tokens=max(1, work))
        )
        place.begun()
        return place

    def _capacity(self) -> int:
        return self._per_replica * self._replicas()

    @property
    def stats(self) -> dict[str, int]:
        stats = self._queue.stats
        return {name: stats[name] for name in TOLD}
