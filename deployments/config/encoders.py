"""The entries of `encoders:` in `args:`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from cfg_core.prefill_only.options import EngineOptions
from deployments.config.base import YamlArgs
from deployments.config.model_paths import last_part, resolve_model


class EncoderArgs(YamlArgs):
    """One entry of `encoders:`. A model that is computed once per input: embedding, reranking,
    classification."""

    section = "encoders"

    model: str = Field(
        description=(
            "Directory of the model, a name on the Hugging Face hub, or `package:NAME/PATH`: a"
            " directory inside an installed Python package."
        ),
    )
    served_model_name: str | None = Field(
        default=None,
        description="The name that clients send as `model`. Default: the last part of `model`.",
    )
    deployment: str = Field(
        default="Embedder",
        min_length=1,
        description=(
            "Its name under `deployments:`, where its replicas and resources are set. One for each"
            " encoder."
        ),
    )
    scales_to_zero: bool = Field(
        default=False,
        description=(
            "Its deployment has `min_replicas: 0`: without a replica it is asleep, not broken, and"
            " /ready and /v1/models do not wake it."
        ),
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Options of the prefill-only engine: the field names of"
            " cfg_core.prefill_only.EngineOptions."
        ),
    )

    @field_validator("engine")
    @classmethod
    def _known_options(cls, engine: dict[str, Any]) -> dict[str, Any]:
        EngineOptions.from_mapping(engine)
        return engine

    @property
    def model_name(self) -> str:
        """The name that clients send as `model`."""
        return self.served_model_name or last_part(self.model)

    @property
    def options(self) -> EngineOptions:
        return EngineOptions.from_mapping(self.engine)

    def resolved(self) -> EncoderArgs:
        """As AppArgs.resolved."""
        return self.model_copy(
            update={"model": resolve_model(self.model), "served_model_name": self.model_name}
        )
