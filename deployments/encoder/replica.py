"""Embedder: a Serve replica that owns one prefill-only engine.

Replicas are data parallel: each has the whole model. Importing this module is cheap: torch is
imported when a replica starts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray import serve
from ray.serve.config import RequestRouterConfig

from cfg_core.errors import CfgServeError, RequestError
from cfg_core.memory import quick_start
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Output, too_many_values
from deployments.config.encoders import EncoderArgs
from deployments.encoder.json_text import json_text
from deployments.health.engine_watch import exit_with_engine
from deployments.messages import Failed
from deployments.observability.log_handlers import log_handlers_kept
from deployments.requests.encode.answer_formats import tokenize_answer
from deployments.requests.encode.jobs import EncodeCall, EncodeJob, in_terms_of
from deployments.requests.encode.tokens import TokenizeRequest
from deployments.requests.usage import EncodedAnswer
from deployments.routing.serve_routers import QueuedTokensRouter

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

ROUTER = RequestRouterConfig(
    request_router_class=QueuedTokensRouter,  # type: ignore[arg-type] # untyped validators
    request_routing_stats_period_s=0.5,  # type: ignore[arg-type]
)

_LONG_ANSWER = 4_000
"""Answers with more numbers than this are turned into text in a thread, not on the event loop."""

_CHARS_OF_NUMBER = 20
"""Characters of texts in an answer that take as long as one number."""


@serve.deployment(
    max_ongoing_requests=256,
    max_queued_requests=1024,
    request_router_config=ROUTER,
)
class Embedder:
    """A prefill-only engine, called by CfgRouter: one call for each HTTP request.

    Errors are returned, as values of `cfg_core.errors`, not raised: Serve logs a traceback for what
    is raised, and a refused request needs none.
    """

    async def __init__(self, args: EncoderArgs) -> None:  # type: ignore[misc] # Serve awaits it
        with log_handlers_kept(), quick_start():  # the executor may be vLLM's
            from cfg_core.prefill_only.async_engine import AsyncEngine

            self._engine = await asyncio.to_thread(AsyncEngine.load, args.model, args.options)
        logger.info("%s computes in %s.", args.model, self._engine.info.dtype)
        self._max_answer_bytes = args.options.max_answer_bytes
        self._watchdog = asyncio.create_task(exit_with_engine(lambda: not self._engine.watch()))

    async def info(self) -> ModelInfo:
        """What the model can do, which does not change."""
        return self._engine.info

    async def compute(
        self, job: EncodeJob, tenant: str = "", weight: float = 1.0
    ) -> EncodedAnswer | Failed:
        """The answer of a job.

        Cancelling the call removes its sequences from the engine's queue.

        tenant: who sent the request. weight: the tenant's share of the engine.
        """
        return await self._value(self._compute(job, tenant, weight))

    async def _compute(self, job: EncodeJob, tenant: str, weight: float) -> EncodedAnswer:
        room = (
            int(self._max_answer_bytes / job.answer.bytes_per_value)
            if job.answer.bytes_per_value
            else None
        )
        parts = await asyncio.gather(*(self._run(call, room, tenant, weight) for call in job.calls))
        outputs = [output for part in parts for output in part]
        num_values = sum(output.num_values for output in outputs)
        if room is not None and num_values > room:
            raise too_many_values(num_values, room)
        size = num_values + job.answer.num_chars // _CHARS_OF_NUMBER
        text = await self._worded(size, lambda: job.answer(outputs))
        return EncodedAnswer(text=text, num_tokens=sum(output.num_tokens for output in outputs))

    async def _worded(self, size: int, answer: Callable[[], Any]) -> str:
        """The JSON text of an answer, whose size is measured in numbers."""
        if size > _LONG_ANSWER:
            return await asyncio.to_thread(lambda: json_text(answer()))
        return json_text(answer())

    async def _run(
        self, call: EncodeCall, room: int | None, tenant: str, weight: float
    ) -> list[Output]:
        try:
            return await self._engine.run(
                call.inputs, call.options, room, tenant=tenant, weight=weight
            )
        except RequestError as error:
            raise in_terms_of(call, error) from None

    async def tokenize(self, request: TokenizeRequest) -> str | Failed:
        """The answer of /tokenize, as JSON text."""
        return await self._value(self._tokenize(request))

    async def _tokenize(self, request: TokenizeRequest) -> str:
        try:
            ids = await self._engine.token_ids(request.text, request.add_special_tokens)
        except RequestError as error:
            raise RequestError(error.message.replace("input 0", "prompt", 1), "prompt") from None
        strings = await self._engine.tokens_of(ids) if request.with_strings else None
        answer = tokenize_answer(ids, self._engine.info.max_input_tokens, strings)
        return await self._worded(len(ids), lambda: answer)

    async def detokenize(self, token_ids: list[int]) -> str | Failed:
        """The answer of /detokenize, as JSON text."""
        return await self._value(self._detokenize(token_ids))

    async def _detokenize(self, token_ids: list[int]) -> str:
        return json_text({"prompt": await self._engine.text_of(token_ids)})

    async def engine_state(self) -> dict[str, int] | Failed:
        """What waits and what runs in this replica's engine, at this moment."""
        return await self._value(self._alive_stats())

    async def _alive_stats(self) -> dict[str, int]:
        self._engine.check_health()
        return self._engine.stats()

    async def record_routing_stats(self) -> dict[str, int]:
        """Called by Serve every `request_routing_stats_period_s`.

        QueuedTokensRouter goes by QUEUED_TOKENS; the rest is for /metrics.
        """
        return self._engine.stats() | self._engine.totals()

    async def check_health(self) -> None:
        """Called by Serve at each health check: raises if the engine is dead or stuck.

        It says nothing about how much waits: a replica with a full queue is well.
        """
        self._engine.check_health()

    async def _value(self, answer: Awaitable[T]) -> T | Failed:
        try:
            return await answer
        except CfgServeError as error:
            if not isinstance(error, RequestError):
                logger.error("%s: %s", type(error).__name__, error)
            return Failed(error)

    def __del__(self) -> None:
        if hasattr(self, "_watchdog"):
            self._watchdog.cancel()
            self._engine.close()
