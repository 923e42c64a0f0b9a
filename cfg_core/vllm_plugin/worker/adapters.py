"""Which adapter (LoRA) each row of logits has, for both model runners."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance


class AdaptersOfRows(LoRAModelRunnerMixin):
    """vLLM's part of a runner that sets adapters. Its head finds that of a row by the row's place.

    guidance: the RunnerGuidance of this runner.
    """

    guidance: RunnerGuidance

    @override
    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> None:
        """Call vLLM's method, with the adapters of suffixes' rows behind those of the batch.

        prompt_lora_mapping: the adapter of each row that gets logits.
        """
        if self.guidance.suffixes is not None:
            prompt_lora_mapping = self.guidance.suffixes.adapters(prompt_lora_mapping)
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)
