"""Calls that go straight to the replica that was chosen for them, not through Serve's handle."""

from __future__ import annotations

from functools import partial

from deployments.direct.connections import Connections, DirectItems
from deployments.messages import GenerateCall
from deployments.routing import shared


class DirectCalls:
    """Sends calls to the replicas of one deployment, by connections of its own.

    Used from one event loop.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._connections = Connections()

    async def begin(self, call: GenerateCall) -> DirectItems | None:
        """Send the call to the best replica.

        None if the call must go through Serve: no replica is known yet, the best one takes no
        direct calls (generator/direct_calls.py), or it cannot be reached. Serve then finds out
        whether it is dead.
        """
        placements = shared.placements(self._deployment)
        chosen = placements and placements.direct(call.call_id, call)
        if not placements or not chosen:
            return None
        replica, address = chosen
        answered = partial(placements.answered, call.call_id, replica)
        try:
            items = await self._connections.begin(address, call, answered)
        except BaseException as error:
            answered()
            if isinstance(error, OSError):
                return None
            raise
        placements.sent(call.call_id, call, replica)
        return items
