"""The table of all patches of the application: inside vLLM, Python's logging and uvicorn.

docs/patches.md shows it. The plugin has a table of its own: cfg_core/vllm_plugin/patches.py. Each
patch is applied only in the process that its row names.
"""

from __future__ import annotations

from cfg_core import patches
from cfg_core.patches import Patch

_GENERATOR = "deployments.generator"
_NO_HOOK = "0.32.0 has no hook for it"
_CALLS = f"{_GENERATOR}.engine_calls:EngineCalls"
_REPLICA = "generator replica"

PATCHES = (
    Patch(
        target="vllm.v1.engine.logprobs:convert_ids_list_to_tokens",
        by=f"{_GENERATOR}.token_texts:TokenTexts",
        process=_REPLICA,
        reason="vLLM decodes each of 20 logprobs of each token anew; here each token once.",
        upstream="0.32.0 keeps no texts of tokens",
        test="tests/contract/test_token_texts.py",
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.generate",
        by=_CALLS,
        process=_REPLICA,
        reason="Chunks are spaced, and a request that failed in the engine fails with its reason.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        by=_CALLS,
        process=_REPLICA,
        reason="Every request passes it. What fails there was caused by the client: 400.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        by=f"{_GENERATOR}.grammar_gate:GrammarGate",
        process=_REPLICA,
        reason="A grammar is tried in a process that can be killed before vLLM reads it.",
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
        reason="Choices that wait for their turn are forgotten with their request.",
        upstream=_NO_HOOK,
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        by=_CALLS,
        process=_REPLICA,
        reason="Counts output tokens, and tells the engine how far its frontend is (pace.py).",
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
        target="vllm.renderers.base:BaseRenderer._executor",
        by=f"{_GENERATOR}.renderer_lanes:use_lanes",
        process=_REPLICA,
        reason="Short texts are tokenized beside long ones, not after them.",
        upstream="0.32.0 renders in one thread, first come first served",
        test="tests/engine/test_vllm_server.py",
        per_object=True,
    ),
    Patch(
        target="logging:_handlerList",
        by="deployments.lifecycle.log_handlers:log_handlers_kept",
        process="replicas, while vLLM starts",
        reason="vLLM configures logging by dictConfig, which closes the handlers of Serve.",
        upstream="0.32.0 calls dictConfig on import and for each engine",
        test="tests/unit/test_log_handlers.py",
        per_object=True,
    ),
    Patch(
        target="uvicorn.protocols.http.httptools_impl:RequestResponseCycle.expected_content_length",
        by="deployments.proxy.http_1_0:end_by_closing",
        process="Serve's proxy",
        reason="A stream to a client of HTTP/1.0 ends by closing the connection.",
        upstream="uvicorn sends chunks, which HTTP/1.0 does not know",
        test="tests/unit/test_serve_proxy.py",
        per_object=True,
    ),
)


def apply(process: str) -> None:
    """Apply the patches whose `process` this is; a second call does nothing."""
    patches.apply(patch for patch in PATCHES if patch.process == process)
