"""What the application changes inside vLLM, xgrammar, Python's logging and uvicorn, as two tables.

docs/patches.md shows them. The plugin has its own: cfg_core/vllm_plugin/vllm_patches.py. Each patch
is applied only in the process that its row names.
"""

from __future__ import annotations

from functools import partial

from cfg_core import patching
from cfg_core.patching import Patch, PrivateUse

_GENERATOR = "deployments.generator"
_NO_HOOK = "no hook for it up to 0.33.0"
_CALLS = f"{_GENERATOR}.engine.calls:EngineCalls"
_NEEDED = "tests/contract/test_still_needed.py"
_SERVING = "vllm.entrypoints.generate.api_router:init_generate_state calls"
REPLICA, SERVER = "generator replica", "Serve's proxy; with HAProxy the ingress replicas"
"""Processes that apply their rows."""
RAY_LLM = "replica of Ray Serve LLM"
"""It applies the rows of a generator replica, too (deployments/ray_llm)."""

_patch = partial(Patch, process=REPLICA)

PATCHES: tuple[Patch, ...] = (
    _patch(
        target="vllm.v1.engine.logprobs:convert_ids_list_to_tokens",
        by=f"{_GENERATOR}.answers.logprobs:TokenTexts",
        reason="vLLM decodes up to 20 logprobs for each token; here each token id is decoded once.",
        upstream="vLLM does not cache the texts of tokens",
        test="tests/contract/test_token_texts.py",
        needed_while=f"{_NEEDED}::test_a_token_is_decoded_each_time",
    ),
    _patch(
        target="vllm.entrypoints.openai.chat_completion.protocol:"
        "ChatCompletionRequest.to_sampling_params",
        by=f"{_GENERATOR}.engine.request_patches:without_scores",
        reason="Guided chats with `echo` have no log-probabilities of the prompt.",
        upstream="vLLM computes them for each `echo`",
        test="tests/engine/test_incomplete_answers.py",
        needed_while=f"{_NEEDED}::test_a_chat_with_echo_asks_for_scores_of_the_prompt",
    ),
    _patch(
        target="vllm.entrypoints.anthropic.serving:"
        "AnthropicServingMessages.to_chat_completion_request",
        by=f"{_GENERATOR}.engine.request_patches:continued",
        reason="If the last message is the assistant's, the model continues it.",
        upstream="vLLM begins a new turn",
        test="tests/engine/test_incomplete_answers.py",
        needed_while=f"{_NEEDED}::test_a_message_of_the_assistant_is_not_continued",
    ),
    *(
        _patch(
            target=target,
            by=f"{_GENERATOR}.engine.request_patches:of_function",
            reason=reason,
            upstream=f"{package} allows any JSON",
            test="tests/contract/test_tool_arguments.py",
            needed_while="tests/contract/test_tool_arguments.py"
            "::test_the_stock_functions_allow_any_json",
        )
        for target, package, reason in (
            (
                "vllm.tool_parsers.structural_tag_registry:get_function_parameters",
                "vLLM 0.33.0",
                "The arguments of a tool that is not strict are a JSON object, and not any JSON.",
            ),
            (
                "vllm.parser.harmony:get_function_parameters",
                "vLLM 0.33.0",
                "The same function, imported by name.",
            ),
            (
                "xgrammar.builtin_structural_tag:_get_function_parameters",
                "xgrammar 0.2.8",
                "The same, in the formats of models that xgrammar has.",
            ),
        )
    ),
    _patch(
        target="ray.serve._private.replica:Replica.perform_graceful_shutdown",
        by=f"{_GENERATOR}.moving.drain:announced",
        reason="A replica that is to stop asks the ingress to move its streams elsewhere.",
        upstream="Serve waits for running requests, and tells the replica after them",
        test="tests/contract/test_drain.py",
        needed_while="ray.serve._private.replica:ReplicaActor.perform_graceful_shutdown "
        "calls self._replica_impl.perform_graceful_shutdown",
    ),
    Patch(
        target="uvicorn.protocols.http.auto:AutoHTTPProtocol",
        by="deployments.proxy.heads:bounded",
        process=SERVER,
        reason="The heads, trailers and pipelined requests of a connection have bounds in size and "
        "in time.",
        upstream="uvicorn bounds heads with h11 only, by their bytes, and Serve does not pass that",
        test="tests/unit/test_heads.py",
        needed_while=f"{_NEEDED}::test_uvicorn_has_no_other_bounds",
    ),
)

_use = partial(
    PrivateUse, process=REPLICA, upstream=_NO_HOOK, test="tests/engine/test_vllm_server.py"
)

USES: tuple[PrivateUse, ...] = (
    _use(
        target="vllm.v1.engine.core_client:AsyncMPClient.add_request_async",
        by=_CALLS,
        reason="No HTTP request has more streams in the engine than its share; tokens are counted.",
        needed_while="vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client "
        "calls AsyncMPClient",
    ),
    _use(
        target="vllm.v1.engine.core_client:AsyncMPClient.abort_requests_async",
        by=_CALLS,
        reason="If a request is aborted, its choices that still wait are dropped.",
        needed_while="vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client "
        "calls AsyncMPClient",
    ),
    _use(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        by=_CALLS,
        reason="Counts output tokens, and reports the frontend's progress to the engine (pace.py).",
        test="tests/engine/test_pace.py",
        needed_while="vllm.v1.engine.async_llm:AsyncLLM.__init__ calls OutputProcessor",
    ),
    _use(
        target="vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.beam_search",
        by=f"{_GENERATOR}.engine.calls:watch_beams",
        reason="Each token of a beam is a request of the engine; its prompt is charged once. The "
        "chat class has the same method.",
        needed_while=f"{_SERVING} OpenAIServingCompletion",
    ),
    _use(
        target="vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion._create_completion_logprobs",
        by=f"{_GENERATOR}.answers.logprobs:show_stream_logprobs",
        reason="`guidance_logprobs` in completions.",
        needed_while=f"{_SERVING} OpenAIServingCompletion",
    ),
    _use(
        target="vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat._create_chat_logprobs",
        by=f"{_GENERATOR}.answers.logprobs:show_stream_logprobs",
        reason="`guidance_logprobs` in chats.",
        needed_while=f"{_SERVING} OpenAIServingChat",
    ),
    _use(
        target="vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat.chat_completion_full_generator",
        by=f"{_GENERATOR}.answers.incomplete:align_with_streams",
        reason="A whole answer that was cut tells what its stream tells, without a call's markup.",
        upstream="whole answers of most parsers have the markup as text",
        test="tests/engine/test_incomplete_answers.py",
        needed_while=f"{_SERVING} OpenAIServingChat",
    ),
    _use(
        target="vllm.entrypoints.openai.responses.serving:"
        "OpenAIServingResponses.responses_full_generator",
        by=f"{_GENERATOR}.answers.incomplete:align_with_streams",
        reason="As above; and the item that was cut is incomplete.",
        upstream="the item is completed in an incomplete response",
        test="tests/engine/test_incomplete_answers.py",
        needed_while=f"{_SERVING} OpenAIServingResponses",
    ),
    _use(
        target="vllm.entrypoints.anthropic.serving:"
        "AnthropicServingMessages.messages_full_converter",
        by=f"{_GENERATOR}.answers.incomplete:align_with_streams",
        reason="The arguments of a call that was cut are no JSON, which vLLM answers with 500. A "
        "message without text has no empty block of text.",
        upstream="it takes them for JSON",
        test="tests/engine/test_incomplete_answers.py",
        needed_while="vllm.entrypoints.anthropic.serving:"
        "AnthropicServingMessages.messages_full_converter calls json.loads",
    ),
    _use(
        target="vllm.v1.engine.async_llm:AsyncLLM.__class__",
        by=f"{_GENERATOR}.engine.serving_engine:GeneratorEngine.adopt",
        process=RAY_LLM,
        reason="What every request passes is the same as in a replica of ours.",
        upstream="Ray Serve LLM makes the engine in the middle of a method",
        test="tests/serve/ray_llm/test_ray_llm.py",
        needed_while="ray.llm._internal.serve.engines.vllm.vllm_engine:"
        "VLLMEngine._start_async_llm_engine calls engine_cls",
    ),
    *(
        _use(
            target=f"vllm.renderers.base:_SwappableExecutor.{attribute}",
            by=f"{_GENERATOR}.engine.renderer_lanes:use_lanes",
            reason=reason,
            upstream="vLLM renders in one thread, first come first served",
            needed_while="vllm.renderers.base:BaseRenderer.__init__ calls _SwappableExecutor",
        )
        for attribute, reason in (
            ("_inner", "Short texts are tokenized in parallel with long ones, not after them."),
            ("replace_inner", "vLLM replaces its threads when a template hangs: with lanes, too."),
        )
    ),
    *(
        _use(
            target=f"vllm.renderers.base:BaseRenderer.{attribute}",
            by=f"{_GENERATOR}.media.turns:take_turns",
            reason=reason,
            upstream="vLLM prepares all media of a request at once, first come first served",
            test="tests/engine/test_images_in_server.py",
            needed_while="vllm.renderers.base:BaseRenderer.__init__ calls ThreadPoolExecutor",
        )
        for attribute, reason in (
            ("_process_multimodal_async", "Images of one client never hold up others for long."),
            ("_mm_processor_cache", "It finds the pieces of a request that are prepared."),
            ("_mm_processor_only_cache", "The same, for what is only rendered."),
        )
    ),
    PrivateUse(
        target="logging:_handlerList",
        by="deployments.observability.log_handlers:log_handlers_kept",
        process="replicas, while vLLM starts",
        reason="vLLM configures logging by dictConfig, which closes the handlers of Serve.",
        upstream="vLLM calls dictConfig on import and for each engine",
        test="tests/unit/test_log_handlers.py",
        needed_while="vllm.logger:_configure_vllm_root_logger calls dictConfig",
    ),
    *(
        PrivateUse(
            target=f"uvicorn.protocols.http.httptools_impl:RequestResponseCycle.{attribute}",
            by="deployments.proxy.http_1_0:end_by_closing",
            process=SERVER,
            reason="A stream to a client of HTTP/1.0 ends by closing the connection.",
            upstream="uvicorn uses chunked encoding, which HTTP/1.0 does not have",
            test="tests/unit/test_serve_proxy.py",
            needed_while=f"{_NEEDED}::test_uvicorn_sends_chunks_whatever_the_version",
        )
        for attribute in ("expected_content_length", "chunked_encoding")
    ),
)

ROWS = (*PATCHES, *USES)


def apply(process: str) -> None:
    """Apply the patches whose `process` this is; a second call does nothing."""
    patching.apply(PATCHES, process)
