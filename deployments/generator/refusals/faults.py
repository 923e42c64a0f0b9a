"""Which field of a body is wrong, and why.

pydantic lists an error for each member of a union, and its order says nothing about what the client
meant. Here the member is chosen by what the value says of itself: by `role` and `type`, else by its
JSON type. Only the fault of that member is told.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from deployments.generator.refusals.annotations import (
    TAGS,
    fields_of,
    is_record,
    is_union,
    item_type,
    json_type_of,
    members_of,
    tags_of,
    unwrapped,
)
from deployments.requests.body import json_type

FILLED = ("annotations", "id", "status")
"""Fields that vLLM adds where a client leaves them out, so they are not what was missed."""

MAX_ITEMS = 1000
"""Items of one list that are looked at."""

Path: TypeAlias = tuple[str | int, ...]


class Fault(NamedTuple):
    """A value that does not fit.

    path: where it is in the body. reason: a sentence without its end.
    is_tag: whether no member of a union fits the tag of the value.
    """

    path: Path
    reason: str
    is_tag: bool = False

    @property
    def field(self) -> str:
        """The path as clients read it, such as `messages[0].content`."""
        shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return shown.removeprefix(".")

    @property
    def sentence(self) -> str:
        reason = self.reason.removesuffix(".")
        return f"{self.field or 'body'}: {reason}."


def fault_of(
    model: type[BaseModel], body: Mapping[str, Any], error: ValidationError | None = None
) -> Fault | None:
    """The first fault of a body; None if none is found.

    error: what pydantic said of the body, if it was asked: it bounds the search.
    """
    fields = fields_of(model)
    told = {name: places for name, places in _told(error).items() if name in fields}
    for name, annotation in fields.items():
        if name in body and (name in told or not told):
            fault = _fault(annotation, body[name], (name,), told.get(name))
            if fault is not None:
                return fault
    return None if error is None else _plain(error, body, ())


def fault_of_item(
    model: type[BaseModel], body: Mapping[str, Any], field: str, *places: int
) -> Fault | None:
    """The fault of one item of a list, of which it is known that it has one.

    places: its index, and those of lists inside of the list.
    """
    annotation, value = fields_of(model)[field], body[field]
    for place in places:
        annotation, value = item_type(annotation), value[place]
    return _fault(annotation, value, (field, *places), set())


def reason_of(error: ValidationError) -> str:
    """What pydantic says first, where the value is not known."""
    return _plain(error, None, ()).reason


def _told(error: ValidationError | None) -> dict[str, set[int]]:
    """The fields that pydantic names, with the indexes of their items that it names."""
    found: dict[str, set[int]] = {}
    for one in [] if error is None else _errors(error):
        if one["loc"]:
            first, *rest = one["loc"]
            indexes = found.setdefault(str(first), set())
            indexes.update([part for part in rest if isinstance(part, int)][:1])
    return found


def _fault(
    annotation: Any, value: object, path: Path, indexes: set[int] | None = None
) -> Fault | None:
    """The fault of a value, or None.

    indexes: the items that are known to have a fault; None if it is not known whether there is one,
        and empty if it is the value itself.
    """
    annotation = unwrapped(annotation)
    if isinstance(value, BaseModel) or annotation is Any:  # vLLM has read it already
        return None
    if is_union(annotation):
        return _fault_of_union(members_of(annotation), value, path, indexes)
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        return Fault(path, f"must be {_one_of(get_args(annotation))}")
    if isinstance(value, list) and json_type_of(annotation) == "a list":
        fault = _fault_of_list(annotation, value, path, indexes)
    elif isinstance(value, dict) and is_record(annotation):
        fault = _fault_of_record(annotation, value, path)
    elif isinstance(value, dict) and get_origin(annotation) is dict and get_args(annotation):
        each = (_fault(get_args(annotation)[1], one, (*path, name)) for name, one in value.items())
        fault = next(filter(None, each), None)
    else:
        kinds = json_type_of(annotation)
        if kinds and kinds != json_type(value) and not _accepts(annotation, value):
            return Fault(path, f"must be {kinds}, not {json_type(value)}")
        fault = None
    return fault or _checked(annotation, value, path)


def _fault_of_list(
    annotation: Any, value: list[Any], path: Path, indexes: set[int] | None
) -> Fault | None:
    inner = item_type(annotation)
    places = sorted(indexes) if indexes else range(min(len(value), MAX_ITEMS))
    for place in places:
        if place < len(value):
            fault = _fault(inner, value[place], (*path, place), set() if indexes else None)
            if fault is not None:
                return fault
    return None


def _fault_of_record(record: Any, value: dict[str, Any], path: Path) -> Fault | None:
    for name, annotation in fields_of(record).items():
        if name in value:
            fault = _fault(annotation, value[name], (*path, name))
            if fault is not None:
                return fault
    return None


def _fault_of_union(
    members: Sequence[Any], value: object, path: Path, indexes: set[int] | None
) -> Fault | None:
    """The fault of the member that the value means: of several, of the one that reads furthest.

    A value that is not known to have a fault has none if one member takes it.
    """
    if isinstance(value, dict):
        records = [member for member in members if is_record(member)]
        meant = _meant(records, value, path)
        if isinstance(meant, Fault):
            others = [member for member in members if not is_record(member)]
            return None if any(_accepts(member, value) for member in others) else meant
        if meant:
            faults = [_fault(member, value, path) for member in meant]
            return None if None in faults and indexes is None else _furthest(faults)
    kind = json_type(value)
    literals = [x for m in members if get_origin(m) is Literal for x in get_args(m)]
    fitting = [m for m in members if json_type_of(m) in (kind, "")]
    if not isinstance(value, dict | list) and any(_accepts(m, value) for m in members):
        return None
    if literals and isinstance(value, str) and all(get_origin(m) is Literal for m in fitting):
        return Fault(path, f"must be {_one_of(literals)}")
    if not fitting:
        kinds = dict.fromkeys(filter(None, map(json_type_of, members)))
        wanted = [kind for kind in kinds if kind != "null"] or ["null"]
        return Fault(path, f"must be {' or '.join(wanted)}, not {json_type(value)}")
    faults = [_fault(member, value, path, indexes) for member in fitting]
    return None if None in faults else _furthest(faults)


def _meant(records: Sequence[Any], value: dict[str, Any], path: Path) -> list[Any] | Fault:
    """The records that an object can mean by its tags, or the fault of its tag."""
    if len(records) < 2:
        return list(records)
    tags = {tag: [tags_of(record).get(tag) for record in records] for tag in TAGS}
    fits, open_to = [], []
    for place, record in enumerate(records):
        known = {tag: tags[tag][place] for tag in TAGS if tag in value}
        closed = {tag: values for tag, values in known.items() if values is not None}
        if any(value[tag] not in values for tag, values in closed.items()):
            continue
        has_tag = any(tag in fields_of(record) for tag in known)
        if closed:
            fits.append(record)
        elif has_tag:
            open_to.append(record)
    if fits or open_to:
        return [*fits, *open_to]
    for tag in TAGS:
        allowed = [x for values in tags[tag] if values is not None for x in values]
        if allowed and tag in value:
            return Fault((*path, tag), f"must be {_one_of(allowed)}", is_tag=True)
    for tag in TAGS:
        if any(values is not None for values in tags[tag]):
            return Fault((*path, tag), "Field required", is_tag=True)
    return list(records)


def _furthest(faults: Sequence[Fault | None]) -> Fault | None:
    found = [fault for fault in faults if fault is not None]
    return max(found, key=_reach, default=None)  # of equal ones, the first


def _reach(fault: Fault) -> tuple[tuple[int, ...], bool]:
    places = tuple(part if isinstance(part, int) else 0 for part in fault.path)
    return places, not fault.is_tag


def _one_of(values: Iterable[object]) -> str:
    shown = [f"'{value}'" for value in dict.fromkeys(values)]
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


# --- what pydantic says ---------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    if is_record(annotation):
        return TypeAdapter(annotation)
    return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))


def _error_of(annotation: Any, value: object) -> ValidationError | None:
    try:
        _adapter(annotation).validate_python(value)
    except ValidationError as error:
        return error
    except (PydanticUserError, TypeError, AttributeError, LookupError, ValueError):
        return None  # pydantic cannot tell
    return None


def _accepts(annotation: Any, value: object) -> bool:
    return _error_of(annotation, value) is None


def _checked(annotation: Any, value: object, path: Path) -> Fault | None:
    error = _error_of(annotation, value)
    return None if error is None else _plain(error, value, path)


def _errors(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_input=False)


def _plain(error: ValidationError, value: object, path: Path) -> Fault:
    """The first of pydantic's errors."""
    errors = _errors(error)
    first = next((e for e in errors if not e["loc"] or e["loc"][-1] not in FILLED), errors[0])
    reason = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    where = (*path, *_in_value(first["loc"], value, first["type"] == "missing"))
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tags = first.get("ctx", {})
        where = (*where, tags["discriminator"].strip("'"))
        expected = tags.get("expected_tags")
        reason = f"must be one of {expected}" if expected else "Field required"
    return Fault(where, reason)


def _in_value(loc: Iterable[str | int], value: object, is_missing: bool) -> Path:
    """The parts of pydantic's path that are in the value; a missing field is the last part."""
    parts: list[str | int] = []
    loc = tuple(loc)
    inner: Any = value
    for place, part in enumerate(loc):
        is_index = isinstance(inner, list) and isinstance(part, int) and part < len(inner)
        if is_index or (isinstance(inner, dict) and part in inner):
            parts.append(part)
            inner = inner[part]
        elif is_missing and place == len(loc) - 1:
            parts.append(part)
    return tuple(parts)
