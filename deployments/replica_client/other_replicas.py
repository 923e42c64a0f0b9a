"""Sends the call of a stream to another replica, because the one that has it is lost or leaves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from cfg_core.errors import CfgServeError, EngineDeadError
from deployments.messages import LOST, Chunk
from deployments.replica_client.admitted import AdmittedRequest
from deployments.replica_client.answers import in_time
from deployments.replica_client.calls import GeneratorCalls
from deployments.requests.progress import Begun
from deployments.routing.call_placer import can_go_on, placer_of

LOST_ONE, DRAINED = REASONS = ("lost", "drained")
"""Why a stream is moved, as /metrics names it."""

TAKEN_WITHIN_S = 10.0
"""Seconds in which another replica must send the first chunk of a stream that it takes from one
that leaves. Meanwhile its client waits."""

TOLD_WITHIN_S = 5.0
"""Seconds in which a replica that has started must tell what it computes with. If there is no other
one, a stream that was lost waits for that."""
LOOK_EACH_S = 0.05


class OtherReplicas:
    """See `moves.Moves`. No move waits for a replica that has yet to start.

    deployment: the name of the replicas' deployment.
    moved: how many streams were moved, by REASONS.
    """

    def __init__(
        self,
        deployment: str,
        calls: GeneratorCalls,
        request: AdmittedRequest,
        deadline: float | None,
        moved: Counter[str],
    ) -> None:
        self._deployment, self._calls = deployment, calls
        self._request, self._deadline = request, deadline
        self._moved = moved

    async def from_lost(self, begun: Begun, lost: EngineDeadError) -> Chunk | str:
        async with in_time(self._deadline):
            if not await self._can_go_on(begun.model):
                raise lost
        self._moved[LOST_ONE] += 1
        self._request.end_call(lost)
        self._request.begun = begun
        return await self._calls.open(self._request, self._deadline)

    async def from_leaving(self, begun: Begun) -> Chunk | None:
        placer = placer_of(self._deployment)
        if placer is None or not placer.has_room(self._request.call.group, begun.model):
            return None
        present = self._request.leave_call(begun)
        try:
            async with asyncio.timeout(TAKEN_WITHIN_S):
                first = await self._calls.open(self._request, self._deadline, may_wait=False)
        except (CfgServeError, TimeoutError) as error:
            self._request.return_to(present)
            if isinstance(error, CfgServeError):
                raise
            raise EngineDeadError(LOST) from None
        except BaseException:
            present.end()
            raise
        if not isinstance(first, Chunk):
            self._request.return_to(present)
            raise EngineDeadError(LOST)
        present.end()
        self._moved[DRAINED] += 1
        return first

    async def _can_go_on(self, model: str) -> bool:
        """Whether there is a replica that can go on with what was begun with this model."""
        gives_up_at = time.monotonic() + TOLD_WITHIN_S
        while not can_go_on(self._deployment, model):
            placer = placer_of(self._deployment)
            if placer is None or not placer.awaits_report() or time.monotonic() > gives_up_at:
                return False
            await asyncio.sleep(LOOK_EACH_S)
        return True
