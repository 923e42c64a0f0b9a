"""VllmServer without Ray and HTTP, for tests.

Its engine has a process of its own, as in a replica.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cfg_core.grammars.trials import GrammarLimits
from deployments.config.args import AppArgs
from deployments.messages import GenerateCall
from deployments.requests.endpoints import Endpoint
from deployments.requests.group import group_request
from deployments.requests.guidance_fields import read_guidance
from deployments.requests.streams import streams_of
from deployments.requests.usage import Meter
from tests.engine.engines import forget_settings

T = TypeVar("T")


class Server:
    """A VllmServer and the event loop that it lives in.

    The process that checks grammars starts with the first grammar, as few tests send one.

    frontend: fields of vLLM's FrontendArgs. engine: fields of its AsyncEngineArgs.
    """

    def __init__(self, model: Path, frontend: dict[str, Any] | None = None, **engine: Any) -> None:
        from deployments.generator.vllm_server import VllmServer

        forget_settings()
        self._runner = asyncio.Runner()
        basics = {
            "max_model_len": 256,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 8,
        }
        options: dict[str, Any] = {
            "engine": {**basics, **engine},
            "frontend": frontend or {},
            "grammars": GrammarLimits(at_start=False),
        }
        self.vllm: Any = self.run(VllmServer.start(AppArgs(model=str(model), **options)))

    def run(self, coroutine: Awaitable[T], limit_s: float = 120.0) -> T:
        return self._runner.run(asyncio.wait_for(coroutine, limit_s))

    def ask(self, body: dict[str, Any], **options: Any) -> list[str]:
        return self.run(self.texts(body, **options))

    def answer(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads("".join(self.ask(body, **options)))
        return answer

    async def texts(
        self,
        body: dict[str, Any],
        meter: Meter | None = None,
        tenant: str | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        endpoint: Endpoint | None = None,
        client: str = "",
    ) -> list[str]:
        """The texts of an answer. endpoint: default: that of the body's prompt or messages."""
        endpoint = endpoint or ("chat" if "messages" in body else "completion")
        guidance = read_guidance(body, endpoint)
        call = GenerateCall(
            endpoint=endpoint,
            body=body,
            guidance=guidance,
            group=group_request(endpoint, body, streams_of(endpoint, body, guidance)),
            headers={},
            tenant=tenant,
            client=client,
        )
        found = []
        async with aclosing(self.vllm.generate(call, meter or Meter())) as items:
            async for item in items:
                found.append(item.text)
                on_text(item.text)
        return found

    async def idle(self, limit_s: float = 10.0) -> dict[str, int]:
        """Wait until the engine holds nothing. Returns the counts at that time."""
        end = time.monotonic() + limit_s
        stats: dict[str, int] = await self.vllm.stats()
        while stats["running"] + stats["waiting"] and time.monotonic() < end:
            await asyncio.sleep(0.02)
            stats = await self.vllm.stats()
        return stats

    def assert_idle(self) -> None:
        stats = self.run(self.idle())
        assert stats["running"] == stats["waiting"] == stats["groups"] == 0
        assert stats["free_blocks"] == stats["total_blocks"]
        calls = self.vllm._engine.calls
        assert not calls._entries, calls._entries
        assert not calls._sending, calls._sending

    @contextmanager
    def share(self, streams: int) -> Iterator[None]:
        """While open, a request may have this many streams in the engine at once."""
        before, self.vllm._share = self.vllm._share, streams
        yield
        self.vllm._share = before

    def close(self) -> None:
        self.vllm.shutdown()
        self._runner.close()


def events(texts: list[str]) -> list[dict[str, Any]]:
    """The objects of a stream, without its last line `[DONE]`."""
    lines = [line for line in "".join(texts).split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
