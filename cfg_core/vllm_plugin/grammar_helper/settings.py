"""The engine settings that the grammar helper needs, so that no whole VllmConfig is pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_TOKENIZER = (
    "model",
    "tokenizer",
    "runner_type",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
    "code_revision",
)


def settings_of(config: VllmConfig) -> dict[str, Any]:
    """`model`, `outputs` and `speculative`, as `trial.Trial` takes them. They can be pickled."""
    model, speculative = config.model_config, config.speculative_config
    fields = {name: getattr(model, name) for name in _TOKENIZER}
    return {
        "model": {
            **fields,
            "skip_tokenizer_init": model.skip_tokenizer_init,
            "is_diffusion": model.is_diffusion,
            "model_type": model.hf_config.model_type,
            "vocab_size": model.get_vocab_size(),
        },
        "outputs": config.structured_outputs_config,
        "speculative": (
            None
            if speculative is None
            else {"num_speculative_tokens": speculative.num_speculative_tokens}
        ),
    }
