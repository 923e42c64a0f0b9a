"""The section `encoders:` of `args:`: one entry for each encoder."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from cfg_core.prefill_only.options import EngineOptions
from deployments.config.base import YamlArgs
from deployments.config.model_paths import last_part, resolve_model


class EncoderArgs(YamlArgs):
    """One entry of `encoders:`: a model for embedding, reranking or classification.

    An encoder computes each input in one forward pass, and generates no text.
    """

    section = "encoders"

    model: str
    """The model: its directory, a name on the Hugging Face hub, or `package:NAME/PATH`, the
    directory PATH inside the installed Python package NAME.
    """

    served_model_name: str | None = None
    """The name that clients send as `model`. Default: the last part of `model`."""

    deployment: str = Field(default="Embedder", min_length=1)
    """Name of the encoder's Serve deployment. Use it under `deployments:` to set the encoder's
    replicas and resources. Each encoder needs a name of its own.
    """

    scales_to_zero: bool = False
    """Set this to true if the encoder's deployment has `min_replicas: 0`. An encoder without
    replicas then counts as asleep, not as broken: /ready and /v1/models do not start a replica of
    it.
    """

    requests_per_replica: int = Field(default=96, ge=1)
    """Maximum number of requests that are sent to the encoder at the same time, for each of its
    replicas. Further requests wait in a queue of CfgRouter, in which tenants share as in
    `admission`. It should be less than the deployment's `max_ongoing_requests`, so that the replica
    can still answer /ready.
    """

    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the encoder's engine, by the field names of cfg_core.prefill_only.EngineOptions.
    """

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
        """The same entry with the model as an absolute path.

        Raises ConfigError.
        """
        return self.model_copy(
            update={"model": resolve_model(self.model), "served_model_name": self.model_name}
        )
