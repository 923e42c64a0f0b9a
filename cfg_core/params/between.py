"""Between: guidance of the tokens between markers in the text, such as those of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params.checks import check_count, check_flag, from_json
from cfg_core.params.field_table import FLAG, Kind

PARTS = ("thinking", "answer")
"""What `guidance_in` may say: before and after the end of a model's reasoning."""

_EXAMPLE = '{"start_token_id": 151646, "end_token_id": 151647}'
_MARKERS = ("start_token_id", "end_token_id")
_KEYS = (*_MARKERS, "restart_negative")


@dataclass(frozen=True, slots=True)
class Between:
    """The tokens after a start token are guided, up to the end token, which is guided itself.

    start_token_id, end_token_id: a text stands for the one token that it is, until admission has
        looked it up. An end of None never comes.
    restart_negative: whether the followers begin anew at each start token (see
        `cfg_core.policy.groups.output_of_followers`).
    """

    start_token_id: int | str
    end_token_id: int | str | None
    restart_negative: bool = False

    def is_open_after(self, token_ids: Sequence[int]) -> bool:
        """Whether a token after these is between the markers. It looks at each, from the last."""
        ends = (self.start_token_id, self.end_token_id)
        last = next((token for token in reversed(token_ids) if token in ends), None)
        return last is not None and last == self.start_token_id

    def to_entry(self) -> dict[str, Any]:
        """As requests send it."""
        restart = {"restart_negative": True} if self.restart_negative else {}
        return {"start_token_id": self.start_token_id, "end_token_id": self.end_token_id, **restart}


def check_between(value: object, param: str) -> Between:
    """Return `value` as markers, each a token id or a text."""
    if isinstance(value, Between):
        return value
    value = from_json(value)
    if not isinstance(value, Mapping):
        raise GuidanceError(f"{param} must be an object such as {_EXAMPLE}.", param)
    for key in value:
        if key not in _KEYS:
            raise GuidanceError(
                f"{param} has an unknown key {str(key)[:100]!r}. Known: {', '.join(_KEYS)}.", param
            )
    start, end = (_marker(value.get(key), f"{param}.{key}") for key in _MARKERS)
    if start == end:
        raise GuidanceError(
            f"{param}: start_token_id and end_token_id are the same: give two tokens.", param
        )
    restart = check_flag(value.get("restart_negative", False), f"{param}.restart_negative")
    return Between(start, end, restart)


def _marker(value: object, param: str) -> int | str:
    if isinstance(value, str) and value:
        return value
    if value is None or value == "":
        raise GuidanceError(f"{param} is missing: it is a token id, or a text of one token.", param)
    return check_count(value, param, 0)


def check_part(value: object, param: str) -> str:
    """Return `value` if it is one of PARTS."""
    if not isinstance(value, str) or value not in PARTS:
        raise GuidanceError(f"{param} must be {' or '.join(map(repr, PARTS))}.", param)
    return value


_MARKER = {"type": ["integer", "string"]}
MARKERS = Kind(
    check_between,
    {
        "type": "object",
        "properties": {**dict.fromkeys(_MARKERS, _MARKER), "restart_negative": FLAG},
        "required": list(_MARKERS),
    },
)
A_PART = Kind(check_part, {"type": "string", "enum": list(PARTS)})
