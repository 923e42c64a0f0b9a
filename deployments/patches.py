"""The table of all patches of the application: inside vLLM, Python's logging and uvicorn.

docs/patches.md shows it. The plugin has a table of its own: cfg_core/vllm_plugin/patches.py. Each
patch is applied only in the process that its row names.
"""

from __future__ import annotations

from cfg_core import patches
from cfg_core.patches import Patch

_GENERATOR = "deployments.generator"
_NO_HOOK = "no hook for it up to 0.33.0"
_CALLS = f"{_GENERATOR}.engine_calls:EngineCalls"
_REPLICA = "generator replica"
SERVER = "Serve's proxy; with HAProxy the ingress replicas"

PATCHES = (
    Patch(
        target="vllm.v1.engine.logprobs:convert_ids_list_to_tokens",
        by=f"{_GENERATOR}.token_texts:TokenTexts",
        process=_REPLICA,
        reason="vLLM decodes up to 20 logprobs for each token; here each token id is decoded once.",
        upstream="vLLM does not cache the texts of tokens",
        test="tests/contract/test_token_texts.py",
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.generate",
        by=_CALLS,
        process=_REPLICA,
        reason="Chunks of a stream are sent at intervals, and a request that failed in the engine "
        "gets the reason in its error.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        by=_CALLS,
        process=_REPLICA,
        reason="Every request passes through it. An error raised there is the client's fault: 400.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        by=f"{_GENERATOR}.grammar_gate:GrammarGate",
        process=_REPLICA,
        reason="Before vLLM reads a grammar, it is compiled in a process that can be killed.",
        upstream=_NO_HOOK,
        test="tests/engine/test_grammar_sandbox.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.core_client:AsyncMPClient.add_request_async",
        by=_CALLS,
        process=_REPLICA,
        reason="No HTTP request has more streams in the engine than its share; tokens are counted.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.core_client:AsyncMPClient.abort_requests_async",
        by=_CALLS,
        process=_REPLICA,
        reason="If a request is aborted, its choices that still wait are dropped.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        by=_CALLS,
        process=_REPLICA,
        reason="Counts output tokens, and reports the frontend's progress to the engine (pace.py).",
        upstream=_NO_HOOK,
        test="tests/engine/test_pace.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.beam_search",
        by=f"{_CALLS}.watch_beams",
        process=_REPLICA,
        reason="Each token of a beam is a request of the engine; its prompt is charged once. The "
        "chat class has the same method.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion._create_completion_logprobs",
        by=f"{_GENERATOR}.logprobs:show_stream_logprobs",
        process=_REPLICA,
        reason="`guidance_logprobs` in completions.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat._create_chat_logprobs",
        by=f"{_GENERATOR}.logprobs:show_stream_logprobs",
        process=_REPLICA,
        reason="`guidance_logprobs` in chats.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat.chat_completion_full_generator",
        by=f"{_GENERATOR}.cut_answers:show_cuts",
        process=_REPLICA,
        reason="A whole answer that was cut tells what its stream tells, without a call's markup.",
        upstream="whole answers of most parsers have the markup as text",
        test="tests/engine/test_cut_answers.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.openai.responses.serving:"
        "OpenAIServingResponses.responses_full_generator",
        by=f"{_GENERATOR}.cut_answers:show_cuts",
        process=_REPLICA,
        reason="As above; and the item that was cut is incomplete.",
        upstream="the item is completed in an incomplete response",
        test="tests/engine/test_cut_answers.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.anthropic.serving:"
        "AnthropicServingMessages.messages_full_converter",
        by=f"{_GENERATOR}.cut_answers:show_cuts",
        process=_REPLICA,
        reason="The arguments of a call that was cut are no JSON, which vLLM answers with 500. A "
        "message without text has no empty block of text.",
        upstream="it takes them for JSON",
        test="tests/engine/test_cut_answers.py",
        per_object=True,
    ),
    Patch(
        target="vllm.entrypoints.openai.chat_completion.protocol:"
        "ChatCompletionRequest.to_sampling_params",
        by=f"{_GENERATOR}.guided_chats:without_scores",
        process=_REPLICA,
        reason="Guided chats with `echo` have no log-probabilities of the prompt.",
        upstream="vLLM computes them for each `echo`",
        test="tests/engine/test_cut_answers.py",
    ),
    Patch(
        target="vllm.entrypoints.anthropic.serving:"
        "AnthropicServingMessages.to_chat_completion_request",
        by=f"{_GENERATOR}.prefill:continued",
        process=_REPLICA,
        reason="If the last message is the assistant's, the model continues it.",
        upstream="vLLM begins a new turn",
        test="tests/engine/test_cut_answers.py",
    ),
    Patch(
        target="vllm.tool_parsers.structural_tag_registry:get_function_parameters",
        by=f"{_GENERATOR}.tool_arguments:of_function",
        process=_REPLICA,
        reason="The arguments of a tool that is not strict are a JSON object, and not any JSON.",
        upstream="vLLM allows any JSON (up to 0.33.0)",
        test="tests/contract/test_tool_arguments.py",
    ),
    Patch(
        target="vllm.parser.harmony:get_function_parameters",
        by=f"{_GENERATOR}.tool_arguments:of_function",
        process=_REPLICA,
        reason="The same function, imported by name.",
        upstream="as above",
        test="tests/contract/test_tool_arguments.py",
    ),
    Patch(
        target="xgrammar.builtin_structural_tag:_get_function_parameters",
        by=f"{_GENERATOR}.tool_arguments:of_function",
        process=_REPLICA,
        reason="The same, in the formats of models that xgrammar has.",
        upstream="xgrammar 0.2.8 allows any JSON",
        test="tests/contract/test_tool_arguments.py",
    ),
    Patch(
        target="vllm.renderers.base:BaseRenderer._executor",
        by=f"{_GENERATOR}.renderer_lanes:use_lanes",
        process=_REPLICA,
        reason="Short texts are tokenized in parallel with long ones, not after them.",
        upstream="vLLM renders in one thread, first come first served",
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="logging:_handlerList",
        by="deployments.lifecycle.log_handlers:log_handlers_kept",
        process="replicas, while vLLM starts",
        reason="vLLM configures logging by dictConfig, which closes the handlers of Serve.",
        upstream="vLLM calls dictConfig on import and for each engine",
        test="tests/unit/test_log_handlers.py",
        per_object=True,
    ),
    Patch(
        target="uvicorn.protocols.http.httptools_impl:RequestResponseCycle.expected_content_length",
        by="deployments.proxy.http_1_0:end_by_closing",
        process=SERVER,
        reason="A stream to a client of HTTP/1.0 ends by closing the connection.",
        upstream="uvicorn uses chunked encoding, which HTTP/1.0 does not have",
        test="tests/unit/test_serve_proxy.py",
        per_object=True,
    ),
    Patch(
        target="uvicorn.protocols.http.auto:AutoHTTPProtocol",
        by="deployments.proxy.heads:bounded",
        process=SERVER,
        reason="The heads, trailers and pipelined requests of a connection have bounds in size and "
        "in time.",
        upstream="uvicorn bounds heads with h11 only, by their bytes, and Serve does not pass that",
        test="tests/unit/test_heads.py",
    ),
)


def apply(process: str) -> None:
    """Apply the patches whose `process` this is; a second call does nothing."""
    patches.apply(patch for patch in PATCHES if patch.process == process)
