"""The Serve application with a generator that computes nothing, for ceiling.py.

`build` is the import path of its YAML. CEILING_SOURCE in the environment says what is free:

- `core`: vLLM's engine process. Its frontend gets a token for every request as soon as it asks, so
  serving classes, texts and chunks are vLLM's and ours.
- `replica`: all of vLLM. The replica sends events of one token each that are made beforehand.
"""

# No `from __future__ import annotations` here: Serve reads the annotation of `build`.

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.config.args import AppArgs
from deployments.generator.replica import ROUTER, ModelReplica
from deployments.http.text_answers import DONE
from deployments.ingress.router import CfgRouter
from deployments.messages import Chunk, GenerateCall
from deployments.requests.progress import Part, Progress, pack
from deployments.requests.usage import Meter, OutputCounts

SOURCE = "CEILING_SOURCE"
TOKEN_ID = 100
MODEL = "free"
STATS = {"total_blocks": 100_000, "free_blocks": 100_000, "max_num_seqs": 256}


class FreeCore:
    """Stands in for vLLM's AsyncMPClient: the engine process, as its frontend sees it."""

    def __init__(self, **_: Any) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._left: dict[str, int] = {}
        self._arrived = asyncio.Event()

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._arrived.set()

    async def abort_requests_async(self, names: Sequence[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    async def get_output_async(self) -> Any:
        """One token for each request, at the next turn of the event loop."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        await asyncio.sleep(0)
        while not self._left:
            self._arrived.clear()
            await self._arrived.wait()
        outputs = []
        for name in list(self._left):
            self._left[name] -= 1
            ended = not self._left[name]
            reason = FinishReason.LENGTH if ended else None
            outputs.append(
                EngineCoreOutput(request_id=name, new_token_ids=[TOKEN_ID], finish_reason=reason)
            )
            if ended:
                del self._left[name]
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    async def call_utility_async(self, name: str, *_: Any) -> Any:
        assert name == "guidance_stats", name
        return dict(STATS)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


class FreeServer:
    """Stands in for VllmServer."""

    errored, model = False, MODEL

    def recorder(self, call: GenerateCall, meter: Meter) -> Any:
        return SimpleNamespace(take_whole=lambda: None)

    async def generate(self, call: GenerateCall, meter: Meter, *_: Any) -> AsyncIterator[Chunk]:
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
        fields = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1700000000}
        event = f"data: {json.dumps({**fields, 'model': 'stories', 'choices': [choice]})}\n\n"
        token = ((Part(0, pack([TOKEN_ID])),),)
        for n in range(call.body["max_tokens"]):
            counts = OutputCounts(n, 0, n, n, (0, 0, 0, 0.0))
            yield Chunk(event, progress=Progress(token, counts, "" if n else MODEL))
            await asyncio.sleep(0)
        yield Chunk(DONE)

    async def stats(self) -> dict[str, int]:
        return dict(STATS)

    async def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


_OwnReplica: Any = ModelReplica.func_or_class  # type: ignore[attr-defined] # Serve is not typed


class FreeReplica(_OwnReplica):  # type: ignore[misc] # see above
    """ModelReplica with one of the two in place of what it stands for."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc] # Serve awaits it
        from vllm.v1.engine.core_client import EngineCoreClient

        from deployments.generator.vllm_server import VllmServer

        async def start(*_: Any, **__: Any) -> FreeServer:
            return FreeServer()

        if os.environ[SOURCE] == "replica":
            VllmServer.start = start  # type: ignore[assignment]
        else:
            EngineCoreClient.make_async_mp_client = FreeCore
        await super().__init__(args)


def build(args: AppArgs) -> Application:
    replica: Any = serve.deployment(
        name="ModelReplica", max_ongoing_requests=256, request_router_config=ROUTER
    )(FreeReplica)
    router: Any = CfgRouter
    args = args.resolved()
    application: Application = router.bind({args.model_name: replica.bind(args)}, {}, args)
    return application
