"""Fair starts: how many requests of one address may be on their way into an ingress.

Serve's proxy and the ingress serve requests in the order of their arrival, and each request costs
both of them some milliseconds. So 400 requests that one client sends at once would make everybody
else wait for all 400. Here an address passes on AT_ONCE of them, and the others wait.

A request has started when its answer begins. That can be late: an answer that is no stream begins
when its text is complete. So while requests of an address wait, the ingress is asked for something
that costs it nothing (the probe). When the probe is answered, all that was passed on before it has
started, because the order is that of arrival. So the pace is what the proxy and the ingress can do,
and an address of which no request waits pays nothing. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

logger = logging.getLogger("ray.serve")

AT_ONCE = 8
"""Requests of one address that may be on their way. They delay others by about 0.1 s."""

PROBE_LIMIT_S = 5.0
"""If a probe is not answered within this time, the requests that wait go on as if it were.

A client must not wait here for an ingress that is gone: Serve says 503 to it.
"""


class Starts:
    """The requests of each address that are on their way, and those that wait for a turn."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[str, _Line] = WeakValueDictionary()

    async def begin(self, address: str, probe: Callable[[], Awaitable[object]]) -> Start:
        """Wait for a turn of `address`. The caller must `end` the Start once it has started.

        probe: asks the ingress for something, and returns when it has answered.
        """
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line()
        return await line.begin(probe)


class Start:
    """One request that is on its way."""

    def __init__(self, line: _Line) -> None:
        self._line = line

    def end(self) -> None:
        """Let the next request go; a second call does nothing."""
        self._line.end({self})


class _Line:
    """The requests of one address. It lives as long as one of them is on its way or waits."""

    def __init__(self) -> None:
        self._on_way: set[Start] = set()
        self._waiting: deque[asyncio.Future[Start]] = deque()
        self._pace: asyncio.Task[None] | None = None

    async def begin(self, probe: Callable[[], Awaitable[object]]) -> Start:
        turn: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        if self._waiting and self._pace is None:
            self._pace = asyncio.ensure_future(self._keep_pace(probe))
        return await turn

    def end(self, starts: set[Start]) -> None:
        self._on_way -= starts
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._on_way) < AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                start = Start(self)
                self._on_way.add(start)
                turn.set_result(start)

    async def _keep_pace(self, probe: Callable[[], Awaitable[object]]) -> None:
        """Probe while a request waits, and end what was on its way before each probe."""
        while self._waiting:
            before = set(self._on_way)
            try:
                async with asyncio.timeout(PROBE_LIMIT_S):
                    await probe()
            except Exception as error:
                logger.warning("The probe of the ingress failed: %s", type(error).__name__)
            self.end(before)
        self._pace = None
