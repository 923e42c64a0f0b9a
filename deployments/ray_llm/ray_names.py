"""The names of Ray Serve LLM that are used here and are not public.

Ray 2.60 pins vLLM 0.29, and is used with 0.32 here. `BROKEN` lists the names of vLLM that Ray's
code imports and that the installed vLLM does not have. tests/contract/test_ray_llm.py compares it
with Ray's source, so nothing else of Ray Serve LLM can fail for a name that is missing.
"""

from __future__ import annotations

from ray.llm._internal.serve.constants import RAYLLM_VLLM_ENGINE_CLS_ENV as ENGINE_CLASS_ENV
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.configs.llm_config import LLMEngine as EngineKind
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorInfo,
    ErrorResponse,
)
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

__all__ = [
    "BROKEN",
    "ENGINE_CLASS_ENV",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionRequest",
    "CompletionResponse",
    "EngineKind",
    "ErrorInfo",
    "ErrorResponse",
    "LLMConfig",
    "RawRequestInfo",
    "VLLMEngine",
]

BROKEN: frozenset[str] = frozenset(
    {
        "vllm.entrypoints.chat_utils:load_chat_template",  # the KV-aware router's tokenizer
        "vllm.entrypoints.chat_utils:parse_chat_messages_async",  # Ray Data's stage for images
    }
)
