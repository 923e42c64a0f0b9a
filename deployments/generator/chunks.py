"""How often the tokens of a stream are sent: each on its own while streams are few, several at once
while they are many.

A chunk costs replica, ingress and proxy about a millisecond together, nearly whatever it holds. 64
streams that send each token on its own leave the engine no CPU on a small machine, and no Python
process sends the 25,000 tokens a second of a GPU one by one. So each stream waits a little between
two chunks. What the engine makes meanwhile goes into the next chunk: vLLM's RequestOutputCollector
joins what was not read yet. The first token of an answer never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sized
from typing import Protocol, TypeVar

CHUNKS_PER_S = 250
"""Of all streams of a replica together: 16 streams send every 60 ms, one alone each token."""

LONGEST_S = 0.1
"""Between two chunks of a stream, however many streams there are."""


class Output(Protocol):
    """vLLM's RequestOutput: `outputs` has one item for each choice that it brings tokens of."""

    finished: bool
    outputs: Sized


OutputT = TypeVar("OutputT", bound=Output)


class Chunks:
    """Spaces the chunks of one replica's streams. A choice of `n` is a stream. Used from the
    replica's event loop."""

    def __init__(self) -> None:
        self.streams = 0

    @property
    def interval_s(self) -> float:
        """Between two chunks of a stream."""
        return min(LONGEST_S, max(0, self.streams - 1) / CHUNKS_PER_S)

    async def spaced(self, outputs: AsyncIterator[OutputT]) -> AsyncGenerator[OutputT]:
        """The same outputs, the next asked for `interval_s` after the last. An answer in one piece
        is no stream: it has no second output."""
        streams = 0
        try:
            async for output in outputs:
                sent = time.monotonic()
                yield output
                if not output.finished:
                    more = max(0, len(output.outputs) - streams)
                    streams += more
                    self.streams += more
                    await _until(sent + self.interval_s)
        finally:
            self.streams -= streams


async def _until(moment: float) -> None:
    if (left_s := moment - time.monotonic()) > 0:
        await asyncio.sleep(left_s)
