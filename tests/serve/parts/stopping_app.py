"""A Serve application whose replica is stopped while it answers a direct call; prints the answer.

Run by test_direct_calls.py. Serve must wait for the replica's `__del__`, which waits for the call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve

from deployments.direct.address import Address
from deployments.direct.connections import Connections
from deployments.generator.replica import start_listener
from deployments.messages import Chunk

NUM_CHUNKS, PAUSE_S = 30, 0.1


@serve.deployment(graceful_shutdown_wait_loop_s=0.1, ray_actor_options={"num_cpus": 0.1})
class Talker:
    """Stands in for ModelReplica."""

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        self._listener = await start_listener("127.0.0.1", self._talk, wanted=True)

    async def _talk(self, call: Any) -> AsyncGenerator[Chunk]:
        for n in range(NUM_CHUNKS):
            await asyncio.sleep(PAUSE_S)
            yield Chunk(f"{n} ")

    async def address(self) -> Address:
        assert self._listener is not None
        return self._listener.address

    async def __del__(self) -> None:
        if self._listener is not None:
            await self._listener.stop()


def nothing() -> None: ...


async def answer_while_it_stops(address: Address) -> str:
    call: Any = "call"
    items, texts = await Connections().begin("replica", address, call, nothing, nothing), []
    deleted: asyncio.Future[None] | None = None
    try:
        while True:
            item = await items.next()
            assert isinstance(item, Chunk)
            texts.append(item.text)
            deleted = deleted or asyncio.ensure_future(asyncio.to_thread(serve.delete, "default"))
    except StopAsyncIteration:
        assert deleted is not None
        await deleted
    return "".join(texts)


def main() -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        app: Any = Talker
        handle = serve.run(app.bind())
        address = handle.address.remote().result(timeout_s=30)
        answer = asyncio.run(asyncio.wait_for(answer_while_it_stops(address), 60))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    print(answer)


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main()
