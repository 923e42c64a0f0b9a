"""How often the tokens of a stream are sent: one by one with few streams, in groups with many.

A chunk costs the replica, the ingress and the proxy about a millisecond together, nearly
independent of its size. On a small machine, 64 streams that send each token on its own leave the
engine no CPU. No Python process can send the 25,000 tokens a second of a GPU one by one. So each
stream waits a little between two chunks. The tokens of that time go into the next chunk: vLLM's
RequestOutputCollector joins what was not read yet. The first token of an answer never waits, and
the last ones are sent when they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sized
from contextlib import suppress
from typing import Protocol, TypeVar

CHUNKS_PER_S = 250
"""Chunks per second of all streams of a replica together, as long as none waits for LONGEST_S.

With 16 streams, each sends every 60 ms. A single stream sends each token on its own. With more than
26, each sends every 100 ms.
"""

LONGEST_S = 0.1
"""Maximum seconds between two chunks of a stream, however many streams there are."""


class StreamedOutput(Protocol):
    """vLLM's RequestOutput: `outputs` has one item for each choice that it brings tokens of."""

    finished: bool
    outputs: Sized


OutputT = TypeVar("OutputT", bound=StreamedOutput)


class ChunkSpacing:
    """Spaces the chunks of one replica's streams.

    Each choice of `n` is a stream. Used from the replica's event loop.
    """

    def __init__(self) -> None:
        self.streams = 0

    @property
    def interval_s(self) -> float:
        """Seconds between two chunks of a stream."""
        return min(LONGEST_S, max(0, self.streams - 1) / CHUNKS_PER_S)

    async def spaced(
        self, outputs: AsyncIterator[OutputT], wake: asyncio.Event | None = None
    ) -> AsyncGenerator[OutputT]:
        """Yield the same outputs, and ask for the next one `interval_s` after the last.

        An answer in one piece has no second output, and is not counted as a stream.

        wake: set it when the next output must not wait, because a choice has finished.
        """
        wake = wake or asyncio.Event()
        streams = 0
        try:
            async for output in outputs:
                wake.clear()  # what it was set for is in this output
                sent = time.monotonic()
                yield output
                if not output.finished:
                    more = max(0, len(output.outputs) - streams)
                    streams += more
                    self.streams += more
                    await _until(sent + self.interval_s, wake)
        finally:
            self.streams -= streams


async def _until(moment: float, wake: asyncio.Event) -> None:
    if (left_s := moment - time.monotonic()) > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await wake.wait()
