"""vLLM's engine and its OpenAI serving classes. The one module of `deployments` that names what vLLM
does not promise to keep; `PRIVATE` lists those names, and tests/contract checks that they exist.

Importing it imports vllm: only a replica does.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import pydantic
from starlette.datastructures import Headers, State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from cfg_core.errors import CfgServeError, EngineDeadError, GuidanceError, RequestError
from cfg_core.params import STREAM_LOGPROBS
from cfg_core.vllm_plugin import guided_engine_args
from cfg_core.vllm_plugin.stream_logprobs import GuidedLogprob
from deployments import sse
from deployments.http_errors import error_of
from deployments.protocol import LOGITS_PROCESSORS, NEGATIVE_IDS, Endpoint, Guidance, guidance_report, negative_body

PRIVATE = {
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "from_vllm_config",
        "generate",
        "get_supported_tasks",
        "check_health",
        "errored",
        "shutdown",
    ),
    "vllm.v1.engine.core_client:AsyncMPClient": ("call_utility_async",),
    "vllm.config:ParallelConfig": ("placement_group",),
    "vllm.entrypoints.generate.base.protocol:RequestResponseMetadata": ("final_usage_info",),
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": (
        "create_completion",
        "_create_completion_logprobs",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat": (
        "create_chat_completion",
        "_create_chat_logprobs",
    ),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ("show_available_models",),
    "vllm.entrypoints.serve.tokenize.serving:ServingTokenization": ("create_tokenize", "create_detokenize"),
    "vllm.renderers.online_renderer:OnlineRenderer": ("render_completion", "render_chat"),
    "vllm.renderers.base:BaseRenderer": ("validate_token_ids",),
}
"""Attributes used here of classes that vLLM may change; the names imported above check themselves."""


class HttpContext:
    """Stands in for the `raw_request` of vLLM's serving classes: the client's headers, and a place
    where vLLM leaves the token usage of the request."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = Headers(dict(headers))
        self.state = State()

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices. Valid once the output is complete."""
        return int(self.state.request_metadata.final_usage_info.completion_tokens or 0)


class VllmServer:
    """One guided vLLM engine behind vLLM's OpenAI serving classes, without HTTP.

    Its methods take JSON bodies and return JSON text. Whatever they raise is a CfgServeError: no class
    of vLLM leaves the replica, where unpickling it would import vllm.
    """

    def __init__(self, engine: AsyncLLM, state: State) -> None:
        self._engine = engine
        self._state = state

    @classmethod
    async def start(
        cls,
        engine_kwargs: dict[str, Any],
        plugin: dict[str, Any],
        frontend: Mapping[str, Any],
        placement_group: Any = None,
    ) -> VllmServer:
        """Start the engine in a process of its own; return when it can answer. Takes minutes on a big model.

        plugin: keyword arguments of `guided_engine_args`. frontend: the `frontend` of AppArgs.
        With a `placement_group`, the workers of Ray's executor take its bundles.
        """
        args = AsyncEngineArgs(**_merged(engine_kwargs, guided_engine_args(**plugin)))
        config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        if placement_group is not None:
            config.parallel_config.placement_group = placement_group
        engine = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[RayPrometheusStatLogger],
            disable_log_stats=args.disable_log_stats,
        )
        tell_reasons(engine)
        state = State()
        options = argparse.Namespace(**{**vars(frontend_args(frontend)), **vars(args)})
        await init_app_state(engine, state, options, await engine.get_supported_tasks())
        show_stream_logprobs(state)
        return cls(engine, state)

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
        self._engine.shutdown()

    # --- generation ---------------------------------------------------------------------------

    async def generate(
        self, endpoint: Endpoint, body: dict[str, Any], guidance: Guidance | None, headers: Mapping[str, str]
    ) -> AsyncIterator[str]:
        """Serve one request, leader and negative: yields the chunks of a stream as vLLM words them, or one JSON text.

        Raises RequestError before the first item if the request can never be served. Closing the
        iterator, or cancelling whoever waits for it, aborts the group in the engine.
        """
        context = HttpContext(headers)
        with own_errors():
            request, negative_tokens = await self._request(endpoint, body, guidance)
            output = checked(await self._create(endpoint, request, context))

            def report() -> dict[str, Any]:
                return guidance_report(guidance, negative_tokens, context.output_tokens)

            if isinstance(output, pydantic.BaseModel):
                yield sse.complete(output.model_dump_json(), report if guidance else None)
                return
            async with aclosing(output):
                async for chunk in sse.guided_chunks(output, report) if guidance else sse.checked_chunks(output):
                    yield chunk

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
        request = _parse(ChatCompletionRequest if endpoint == "chat" else CompletionRequest, body)
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
            rendered = checked(await renderer.render_chat(_parse(ChatCompletionRequest, body)))[1]
        else:
            rendered = checked(await renderer.render_completion(_parse(CompletionRequest, body)))
        if rendered[0]["type"] != "token":
            raise GuidanceError("the negative stream must be text: send negative_messages without images or audio.")
        return list(rendered[0]["prompt_token_ids"])

    # --- the rest of the API ------------------------------------------------------------------

    async def models(self) -> str:
        with own_errors():
            return (await self._state.openai_serving_models.show_available_models()).model_dump_json()

    async def tokenize(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        with own_errors():
            request = _parse(TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest, body)
            create = self._state.serving_tokenization.create_tokenize
            return checked(await create(request, HttpContext(headers))).model_dump_json()

    async def detokenize(self, body: dict[str, Any], headers: Mapping[str, str]) -> str:
        with own_errors():
            create = self._state.serving_tokenization.create_detokenize
            return checked(await create(_parse(DetokenizeRequest, body), HttpContext(headers))).model_dump_json()


def frontend_args(frontend: Mapping[str, Any]) -> FrontendArgs:
    """vLLM's object for the `frontend` of AppArgs."""
    adapters = [LoRAModulePath(**adapter) for adapter in frontend.get("lora_modules", ())]
    return FrontendArgs(**{**frontend, "lora_modules": adapters or None})


def tell_reasons(engine: AsyncLLM) -> None:
    """Let a request that failed in the engine fail with the reason, such as what its logits processor raised.

    The scheduler leaves it in `stop_reason`; vLLM's serving classes say "Internal server error" to every failure.
    """
    generate = engine.generate

    async def generate_or_raise(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                for sample in output.outputs:
                    if sample.finish_reason == "error" and sample.stop_reason:
                        raise GenerationError(str(sample.stop_reason))
                yield output

    engine.generate = generate_or_raise


def show_stream_logprobs(state: State) -> None:
    """Let vLLM's serving classes tell what `guidance_logprobs` asked for, beside their own logprobs."""
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    completion_logprobs, chat_logprobs = completion._create_completion_logprobs, chat._create_chat_logprobs

    def create_completion_logprobs(**fields: Any) -> Any:
        answer = completion_logprobs(**fields)
        entries = _guided_logprobs(fields)
        if any(entries):
            answer.conditional_logprobs = [e and _finite(e.conditional) for e in entries]
            answer.negative_logprobs = [e and [*map(_finite, e.negatives)] for e in entries]
        return answer

    def create_chat_logprobs(**fields: Any) -> Any:
        answer = chat_logprobs(**fields)
        for token, entry in zip(answer.content, _guided_logprobs(fields), strict=True):
            if entry is not None:
                token.conditional_logprob = _finite(entry.conditional)
                token.negative_logprobs = [*map(_finite, entry.negatives)]
        return answer

    completion._create_completion_logprobs = create_completion_logprobs
    chat._create_chat_logprobs = create_chat_logprobs


def _guided_logprobs(fields: Mapping[str, Any]) -> list[GuidedLogprob | None]:
    """Of each token, what the streams say; None for one that was not sampled under guidance (`echo`)."""
    found = (row and row.get(token) for token, row in zip(fields["token_ids"], fields["top_logprobs"], strict=False))
    return [entry if isinstance(entry, GuidedLogprob) else None for entry in found]


def _finite(logprob: float) -> float:
    """As vLLM: JSON has no infinity."""
    return max(logprob, -9999.0)


def _merged(base: dict[str, Any], plugin: dict[str, Any]) -> dict[str, Any]:
    """`base` with the plugin's engine arguments; where both hold a mapping, the two are joined."""
    joined = {k: {**base[k], **v} for k, v in plugin.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **plugin, **joined}


def _parse(model: type[pydantic.BaseModel], body: dict[str, Any]) -> Any:
    """`body` as vLLM's request object, or RequestError that names the field at fault."""
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        raise _invalid(error) from None
    except (AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        # Some validators of vLLM take the types that they are about to check for granted.
        raise RequestError(f"The body has a field of a wrong type: {error}.") from None


def _invalid(error: pydantic.ValidationError) -> RequestError:
    """One sentence from pydantic's list, which has an entry for each member of a union."""
    errors = error.errors(include_url=False, include_input=False)
    field, *path = errors[0]["loc"] or ("body",)
    index = f"[{path[0]}]" if path and isinstance(path[0], int) else ""
    reasons = dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors if e["loc"][:1] == (field,))
    return RequestError(f"{field}{index}: {'; or '.join([*reasons][:3])}.", str(field))


def checked(answer: Any) -> Any:
    """`answer` of a serving class, unless it is vLLM's error object, which is raised as one of ours."""
    if isinstance(answer, ErrorResponse):
        raise _from_response(answer)
    return answer


@contextmanager
def own_errors() -> Iterator[None]:
    """Whatever is raised inside comes out as one of our own errors."""
    try:
        yield
    except Exception as error:
        raise own_error(error) from None


def own_error(error: Exception) -> CfgServeError:
    """Any exception that comes out of vLLM, as one of our own: small, and understood by the router."""
    if isinstance(error, CfgServeError):
        return error
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError("The engine of this replica is gone: send the request again.")
    if isinstance(error, VLLMValidationError):
        return RequestError(str(error.args[0]), error.parameter)
    return _from_response(create_error_response(error))


def _from_response(response: ErrorResponse) -> CfgServeError:
    error = response.error
    return error_of(error.code, error.message, error.param)
