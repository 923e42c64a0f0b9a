"""Calls that go straight to the replica that was chosen for them, not through Serve's handle."""

from __future__ import annotations

from functools import partial

from deployments.direct.connections import Connections, DirectItems
from deployments.direct.protocol import FrameError
from deployments.messages import GenerateCall
from deployments.routing.call_placer import placer_of


class DirectCalls:
    """Sends calls to the replicas of one deployment, by connections of its own.

    Used from one event loop.

    num_taken: calls that a replica has taken.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._connections = Connections()
        self.num_taken = 0

    async def begin(self, call: GenerateCall) -> DirectItems | None:
        """Send the call to the best replica; None if the call must go through Serve.

        That is where no replica is known yet, the best one takes no direct calls
        (generator/replica.py) or cannot be reached, or the call is too large. Serve then finds out
        whether the replica is dead.
        """
        placer = placer_of(self._deployment)
        chosen = placer and placer.direct(call)
        if not placer or not chosen:
            return None
        replica, address = chosen

        def taken() -> None:
            self.num_taken += 1
            placer.sent(call.call_id, call, replica)

        ended = partial(placer.answered, call.call_id, replica)
        try:
            return await self._connections.begin(replica, address, call, taken, ended)
        except BaseException as error:
            ended()
            if isinstance(error, OSError | FrameError):
                return None
            raise
