"""A server class of Ray Serve LLM that takes adapters from a folder of this machine.

Ray's own downloads them from cloud storage, and refuses any other address. Here `s3://` is followed
by the path of a folder, in which each adapter has a folder of its own.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.core.configs.llm_config import DiskMultiplexConfig
from ray.llm._internal.serve.utils.lora_serve_utils import LoraModelLoader
from ray.serve.llm.deployment import LLMServer


class FromFolder(LoraModelLoader):
    async def load_model_from_config(
        self, lora_model_id: str, llm_config: Any
    ) -> DiskMultiplexConfig:
        folder = llm_config.lora_config.dynamic_lora_loading_path.removeprefix("s3://")
        return DiskMultiplexConfig(
            model_id=lora_model_id,
            max_total_tokens=None,
            local_path=f"{folder}/{lora_model_id.partition(':')[2]}",
            lora_assigned_int_id=1,
        )


class LocalAdapters(LLMServer):
    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc] # Serve awaits it
        await super().__init__(llm_config, model_downloader=FromFolder)
