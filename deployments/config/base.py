"""The base class of all sections of `args:`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from cfg_core.keys import check_keys


class YamlArgs(BaseModel):
    """An immutable section of the YAML file.

    An unknown key is an error that names the nearest known one. Errors never show the given value,
    which may be an API key. Pydantic reads that setting from the outermost model, so every section
    has it. The text below each key is shown in docs/configuration.md (scripts/pages).

    A section may also be a dataclass, whose fields have pydantic's constraints as metadata. It is
    named after its field.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    section: ClassVar[str]
    """The section's name in the YAML file."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        check_keys(values, cls.model_fields, cls.section)
        for name, field in cls.model_fields.items():
            inner = values.get(name)
            kind = next(filter(dataclasses.is_dataclass, _kinds(field.annotation)), None)
            if kind is not None and isinstance(inner, Mapping):
                check_keys(inner, [known.name for known in dataclasses.fields(kind)], name)
        return values


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the only one."""
    return get_args(annotation) or (annotation,)
