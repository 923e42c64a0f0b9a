"""vLLM's engine and its OpenAI serving classes. The one module of `deployments` that names what vLLM
does not promise to keep; `PRIVATE` lists those names, and tests/contract checks that they exist.

Importing it imports vllm: only a replica does.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pydantic
from starlette.datastructures import Headers, State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.params import STREAM_LOGPROBS
from cfg_core.vllm_plugin import compat, guided_engine_args, pace
from deployments import own_headers, sse
from deployments.engine_calls import EngineCalls, Run, share_of
from deployments.engine_errors import checked, own_error, own_errors, parse, reading
from deployments.grammar_gate import GrammarGate
from deployments.logprob_answers import show_stream_logprobs
from deployments.protocol import LOGITS_PROCESSORS, NEGATIVE_IDS, Endpoint, Guidance, guidance_report, negative_body
from deployments.renderer_lanes import check_text, use_lanes
from deployments.token_texts import remember_texts
from deployments.usage import Meter

PRIVATE = {
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "from_vllm_config",
        "get_supported_tasks",
        "check_health",
        "errored",
        "shutdown",
    ),
    "vllm.v1.engine.core_client:AsyncMPClient": ("call_utility_async",),
    "vllm.config:ParallelConfig": ("placement_group",),
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": ("create_completion",),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat": ("create_chat_completion",),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ("show_available_models",),
    "vllm.entrypoints.serve.tokenize.serving:ServingTokenization": ("create_tokenize", "create_detokenize"),
    "vllm.renderers.online_renderer:OnlineRenderer": ("render_completion", "render_chat"),
    "vllm.renderers.base:BaseRenderer": ("validate_token_ids",),
}
"""Attributes used here of classes that vLLM may change; the names imported above check themselves."""

OWN_HEADERS = (own_headers.CLIENT, own_headers.TENANT)

RESERVED_XARGS = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")
"""What vLLM reads out of `vllm_xargs` for itself, and takes for an object that the server made."""


class HttpContext:
    """Stands in for the `raw_request` of vLLM's serving classes: the client's headers, and a place
    where vLLM leaves what it knows of the request."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = Headers({name: value for name, value in headers.items() if name not in OWN_HEADERS})
        self.state = State()


class VllmServer:
    """One guided vLLM engine behind vLLM's OpenAI serving classes, without HTTP.

    Its methods take JSON bodies and return JSON text. Whatever they raise is a CfgServeError: no class
    of vLLM leaves the replica, where unpickling it would import vllm.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        state: State,
        calls: EngineCalls,
        share: int,
        max_text_chars: int,
    ) -> None:
        self._engine = engine
        self._state = state
        self._calls = calls
        self._share = share
        self._max_text_chars = max_text_chars
        self._grammars = GrammarGate(engine)
        self._grammars.begin()

    @classmethod
    async def start(
        cls,
        engine_kwargs: dict[str, Any],
        plugin: dict[str, Any],
        frontend: Mapping[str, Any],
        placement_group: Any = None,
        *,
        streams_at_once: int | None = None,
        max_text_chars: int = 4_000_000,
    ) -> VllmServer:
        """Start the engine in a process of its own; return when it can answer. Takes minutes on a big model.

        plugin: keyword arguments of `guided_engine_args`. frontend: the `frontend` of AppArgs.
        With a `placement_group`, the workers of Ray's executor take its bundles.
        streams_at_once: streams that one HTTP request has in the engine at most; default: half of `max_num_seqs`.
        max_text_chars: of /tokenize; a token of /detokenize counts as four.
        """
        args = AsyncEngineArgs(**_merged(engine_kwargs, guided_engine_args(**plugin)))
        with TemporaryDirectory(prefix="cfg-serve-") as folder:
            path = Path(folder) / "pace"
            pace.new_file(path)
            args.additional_config[compat.ADDITIONAL_CONFIG][pace.FILE] = str(path)
            config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            if placement_group is not None:
                config.parallel_config.placement_group = placement_group
            engine = AsyncLLM.from_vllm_config(
                config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                stat_loggers=[RayPrometheusStatLogger],
                disable_log_stats=args.disable_log_stats,
            )
            calls = EngineCalls(engine, pace.Progress(path))
        state = State()
        options = argparse.Namespace(**{**vars(frontend_args(frontend)), **vars(args)})
        await init_app_state(engine, state, options, await engine.get_supported_tasks())
        show_stream_logprobs(state)
        remember_texts()
        use_lanes(engine.renderer)
        for serving in (state.openai_serving_completion, state.openai_serving_chat):
            calls.watch_beams(serving)
        share = share_of(config.scheduler_config.max_num_seqs, streams_at_once)
        return cls(engine, state, calls, share, max_text_chars)

    @property
    def errored(self) -> bool:
        """True once the engine is dead; it does not come back."""
        return bool(self._engine.errored)

    async def check_health(self) -> None:
        """Raises if the engine process is dead. Cheap: asks only this process."""
        with own_errors():
            await self._engine.check_health()

    async def stats(self) -> dict[str, int]:
        """Requests and blocks as the scheduler holds them now: asks the engine process itself."""
        with own_errors():
            return await self._engine.engine_core.call_utility_async("guidance_stats")

    def shutdown(self) -> None:
        self._grammars.close()
        self._engine.shutdown()

    # --- generation ---------------------------------------------------------------------------

    async def generate(
        self,
        endpoint: Endpoint,
        body: dict[str, Any],
        guidance: Guidance | None,
        headers: Mapping[str, str],
        meter: Meter,
    ) -> AsyncIterator[str]:
        """Serve one request, leader and negative: yields the chunks of a stream as vLLM words them, or one JSON text.

        meter: fresh; holds at any moment what the engine has done for this request.
        Raises RequestError before the first item if the request can never be served. Closing the
        iterator, or cancelling whoever waits for it, aborts the group in the engine.
        """
        run = Run(meter, self._share)
        with own_errors():
            with reading():
                await self._grammars.read_body(body, headers.get(own_headers.CLIENT, ""))
                request, negative_tokens = await self._request(endpoint, body, guidance)
                request.cache_salt = self._cache_salt(request.cache_salt, headers)
            self._calls.begin(run)
            output = await self._first(endpoint, request, HttpContext(headers), run)

            def report() -> dict[str, Any]:
                return guidance_report(guidance, negative_tokens, meter.guided_tokens)

            if isinstance(output, pydantic.BaseModel):
                yield sse.complete(await _json_of(output), report if guidance else None)
                return
            async with aclosing(output):
                async for chunk in sse.guided_chunks(output, report) if guidance else sse.checked_chunks(output):
                    yield chunk

    async def _first(self, endpoint: Endpoint, request: Any, context: HttpContext, run: Run) -> Any:
        """vLLM's response, or the iterator of its stream. What fails before the engine has it, the client caused."""
        try:
            return checked(await self._create(endpoint, request, context))
        except Exception:
            if run.has_begun:
                raise
            with reading():
                raise

    def _create(self, endpoint: Endpoint, request: Any, context: HttpContext) -> Awaitable[Any]:
        if endpoint == "chat":
            return self._state.openai_serving_chat.create_chat_completion(request, context)
        return self._state.openai_serving_completion.create_completion(request, context)

    async def _request(
        self, endpoint: Endpoint, body: dict[str, Any], guidance: Guidance | None
    ) -> tuple[CompletionRequest | ChatCompletionRequest, int]:
        """vLLM's request object; the guidance travels in its extra arguments, the negative as token ids."""
        body = dict(body)
        processors = body.pop(LOGITS_PROCESSORS, None)
        request = parse(ChatCompletionRequest if endpoint == "chat" else CompletionRequest, body)
        check_xargs(request.vllm_xargs)
        if processors is not None:
            request.vllm_xargs = {**(request.vllm_xargs or {}), LOGITS_PROCESSORS: processors}
        if guidance is None or not guidance.enabled:
            return request, 0
        extra_args: dict[str, Any] = {"guidance_scale": guidance.scale}
        if guidance.params.logprobs:
            extra_args[STREAM_LOGPROBS] = True
        negative = await self._negative_token_ids(endpoint, body, guidance)
        if negative is not None:
            extra_args[NEGATIVE_IDS] = negative
        request.vllm_xargs = {**(request.vllm_xargs or {}), **extra_args}
        return request, len(negative or [0])

    async def _negative_token_ids(
        self, endpoint: Endpoint, body: dict[str, Any], guidance: Guidance
    ) -> list[int] | None:
        """The negative stream's prompt, rendered as vLLM renders a prompt; None if the request has none of its own."""
        field = guidance.negative_field
        if field is None:
            return None
        try:
            if field == NEGATIVE_IDS:
                ids = list(guidance.params.negative_prompt_token_ids or ())
                self._state.online_renderer.renderer.validate_token_ids(ids)
            else:
                ids = await self._render(endpoint, negative_body(body, guidance))
        except (RequestError, VLLMValidationError) as error:
            raise GuidanceError(f"{field} cannot be used. {own_error(error)}", field) from None
        limit = self._engine.model_config.max_model_len - 1  # one output token at least
        if not 0 < len(ids) <= limit:
            raise GuidanceError(f"{field} has {len(ids)} tokens: this model takes 1 to {limit}.", field)
        return ids

    async def _render(self, endpoint: Endpoint, body: dict[str, Any]) -> list[int]:
        renderer = self._state.online_renderer
        if endpoint == "chat":
            rendered = checked(await renderer.render_chat(parse(ChatCompletionRequest, body)))[1]
        else:
            rendered = checked(await renderer.render_completion(parse(CompletionRequest, body)))
        if rendered[0]["type"] != "token":
            raise GuidanceError("the negative stream must be text: send negative_messages without images or audio.")
        return list(rendered[0]["prompt_token_ids"])

    # --- the rest of the API ------------------------------------------------------------------

    def _cache_salt(self, salt: str | None, headers: Mapping[str, str]) -> str | None:
        """A tenant finds the KV of its own requests alone: else it could tell from timings what others have sent."""
        tenant = headers.get(own_headers.TENANT)
        if tenant is None:
            return salt
        return hashlib.sha256(f"{tenant}\0{salt or ''}".encode()).hexdigest()

    async def models(self) -> str:
        with own_errors():
            models = await self._state.openai_serving_models.show_available_models()
            for card in models.data:
                card.root = card.id  # vLLM tells the directory
            return models.model_dump_json()

    async def tokenize(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        """The answer of /tokenize, as JSON text; its `count` is the number of tokens."""
        with reading():
            field = "messages" if "messages" in body else "prompt"
            check_text(body.get(field), field, self._max_text_chars)
            request = parse(TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest, body)
            create = self._state.serving_tokenization.create_tokenize
            return await _json_of(checked(await create(request, HttpContext(headers))))

    async def detokenize(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        """The answer of /detokenize, as JSON text. The number of tokens is that of the body's `tokens`."""
        with reading():
            check_text(body.get("tokens"), "tokens", self._max_text_chars)
            create = self._state.serving_tokenization.create_detokenize
            return await _json_of(checked(await create(parse(DetokenizeRequest, body), HttpContext(headers))))


def frontend_args(frontend: Mapping[str, Any]) -> FrontendArgs:
    """vLLM's object for the `frontend` of AppArgs."""
    adapters = [LoRAModulePath(**adapter) for adapter in frontend.get("lora_modules", ())]
    return FrontendArgs(**{**frontend, "lora_modules": adapters or None})


def _merged(base: dict[str, Any], plugin: dict[str, Any]) -> dict[str, Any]:
    """`base` with the plugin's engine arguments; where both hold a mapping, the two are joined."""
    joined = {k: {**base[k], **v} for k, v in plugin.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **plugin, **joined}


def check_xargs(xargs: Mapping[str, Any] | None) -> None:
    """Raise RequestError if `vllm_xargs` holds what vLLM reads for itself."""
    for name in RESERVED_XARGS:
        if name in (xargs or ()):
            raise RequestError(f"vllm_xargs may not hold {name}: leave it out.", "vllm_xargs")


async def _json_of(answer: pydantic.BaseModel) -> str:
    """As JSON text. Of many choices one at a time: one with logprobs may be megabytes, and others wait meanwhile."""
    choices = getattr(answer, "choices", ())
    if len(choices) < 2:
        return answer.model_dump_json()
    texts = []
    for choice in choices:
        texts.append(choice.model_dump_json())
        await asyncio.sleep(0)
    frame = answer.model_copy(update={"choices": []}).model_dump_json()
    before, after = frame.split('"choices":[]', 1)
    return f'{before}"choices":[{",".join(texts)}]{after}'
