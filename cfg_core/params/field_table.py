"""One field of a request, with its check and its documentation, and tables of fields.

cfg_core/params/fields.py has the table of the guidance fields, and cfg_core/params/follower.py that
of the keys of one entry of `guidance_streams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from cfg_core.params.token_ids import TokenIds

Schema: TypeAlias = dict[str, Any]
Sent: TypeAlias = Literal["everywhere", "in Python", "in chats over HTTP"]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
IDS: Schema = {"type": "array", "items": COUNT}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}


class Kind(NamedTuple):
    """A kind of values.

    check: called with a value and with the name that errors show. It returns the value in its final
        type, or raises GuidanceError.
    schema: its JSON schema, as far as it is sent as JSON.
    """

    check: Callable[[Any, str], Any]
    schema: Schema


@dataclass(frozen=True)
class Field:
    """One field.

    name: as requests send it.
    kind: of its values.
    help: what it means: in /openapi.json, and on docs/request-fields.md.
    sent: where it may be sent. Values that are sent in Python alone are Python objects.
    needs_guidance: whether it means nothing without followers.
    held_as: the attribute of the class that holds its value. By default its name, without
        `guidance_`. None: no class holds it, the code of chat endpoints reads it.
    """

    name: str
    kind: Kind
    help: str
    sent: Sent = "everywhere"
    needs_guidance: bool = False
    held_as: str | None = ""

    @property
    def attribute(self) -> str | None:
        return self.name.removeprefix("guidance_") if self.held_as == "" else self.held_as


class FieldTable:
    """The fields of a frozen dataclass.

    holder: the class. Its attributes have the defaults.
    """

    def __init__(self, holder: type, rows: Sequence[Field]) -> None:
        known: Mapping[str, dataclasses.Field[Any]] = holder.__dataclass_fields__  # type: ignore[attr-defined]
        self._rows = rows
        self._held = [
            (row, name, known[name].default) for row in rows if (name := row.attribute) is not None
        ]

    def check(self, values: Any, prefix: str = "") -> None:
        """Check all values of an object, and put them into their final types.

        prefix: what errors show in front of a field's name.
        """
        for row, attribute, default in self._held:
            value = getattr(values, attribute)
            if value is not default:
                value = row.kind.check(value, prefix + row.name)
                object.__setattr__(values, attribute, value)

    def given(self, values: Any) -> dict[str, Any]:
        """What differs from the defaults, by the names of the fields, as JSON has it.

        Values that are sent in Python alone, and tensors, stay what they are.
        """
        return {
            row.name: _plain(value)
            for row, attribute, default in self._held
            if (value := getattr(values, attribute)) is not None
            and (default is None or value != default)
        }

    def schemas(self) -> dict[str, Schema]:
        """The JSON schemas of what is sent over HTTP, with defaults and descriptions."""
        defaults = {row.name: default for row, _, default in self._held}
        schemas = {}
        for row in self._rows:
            if row.sent != "in Python":
                default = defaults.get(row.name)
                known = {} if default in (None, dataclasses.MISSING) else {"default": default}
                schemas[row.name] = {**row.kind.schema, **known, "description": row.help}
        return schemas


def _plain(value: Any) -> Any:
    if isinstance(value, TokenIds):
        return value.tolist()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    to_entry = getattr(value, "to_entry", None)
    return value if to_entry is None else to_entry()
