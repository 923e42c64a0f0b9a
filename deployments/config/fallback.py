"""The section `fallback:` of `args:`: what is served if the directory of `model` does not exist."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from deployments.config.base import YamlArgs
from deployments.config.engine_keys import check_engine_keys
from deployments.config.model_paths import last_part


class FallbackArgs(YamlArgs):
    """The model that is served in place of `model`, and how its options differ."""

    section = "fallback"

    model: str
    """The model that is served if the directory of `model` does not exist when the application is
    built.
    """

    served_model_name: str | None = None
    """The name that clients send as `model`. Default: the last part of `model`."""

    engine: dict[str, Any] = Field(default_factory=dict)
    """Options that replace those of the same names in `engine`."""

    @field_validator("engine")
    @classmethod
    def _known_engine_keys(cls, engine: dict[str, Any]) -> dict[str, Any]:
        check_engine_keys(engine)
        return engine

    @property
    def model_name(self) -> str:
        """The name that clients send as `model`."""
        return self.served_model_name or last_part(self.model)
