"""What every section of a YAML's `args:` has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from cfg_core.keys import check_keys


class YamlArgs(BaseModel):
    """A section: immutable; an unknown key is an error that names the nearest known one. Errors
    never show what was given, in case it was a key: pydantic asks the outermost model about that,
    so all of them say so."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    section: ClassVar[str]
    """What it is called in the YAML."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            check_keys(values, cls.model_fields, cls.section)
        return values
