"""Which field of a body is wrong, and why.

pydantic lists an error for each member of a union, and its order says nothing about what the client
meant. Here the member is chosen by what the value says of itself: by `role` and `type`, else by its
JSON type. Only the fault of that member is told.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

import typing_extensions
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from deployments.requests.body import json_type

TAGS = ("type", "role")
"""The fields that say which member of a union an object is."""

FILLED = ("annotations", "id", "status")
"""Fields that vLLM adds where a client leaves them out, so they are not what was missed."""

MAX_ITEMS = 1000
"""Items of one list that are looked at."""

Path: TypeAlias = tuple[str | int, ...]

_WRAPPERS = (
    typing.Required,
    typing.NotRequired,
    typing_extensions.Required,
    typing_extensions.NotRequired,
)
_ALIASES = (
    typing_extensions.TypeAliasType,
    getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType),
)
_LISTS = (list, tuple, set, frozenset, Iterable, Sequence, Iterator)
_KINDS = {
    str: "a string",
    bytes: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


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
    fields = _fields(model)
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
    annotation, value = _fields(model)[field], body[field]
    for place in places:
        annotation, value = _item(annotation), value[place]
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
    annotation = _bare(annotation)
    if isinstance(value, BaseModel) or annotation is Any:  # vLLM has read it already
        return None
    if _is_union(annotation):
        return _fault_of_union(_members(annotation), value, path, indexes)
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        return Fault(path, f"must be {_one_of(get_args(annotation))}")
    if isinstance(value, list) and _kind(annotation) == "a list":
        fault = _fault_of_list(annotation, value, path, indexes)
    elif isinstance(value, dict) and _is_record(annotation):
        fault = _fault_of_record(annotation, value, path)
    elif isinstance(value, dict) and get_origin(annotation) is dict and get_args(annotation):
        each = (_fault(get_args(annotation)[1], one, (*path, name)) for name, one in value.items())
        fault = next(filter(None, each), None)
    else:
        kinds = _kind(annotation)
        if kinds and kinds != json_type(value) and not _accepts(annotation, value):
            return Fault(path, f"must be {kinds}, not {json_type(value)}")
        fault = None
    return fault or _checked(annotation, value, path)


def _fault_of_list(
    annotation: Any, value: list[Any], path: Path, indexes: set[int] | None
) -> Fault | None:
    inner = _item(annotation)
    places = sorted(indexes) if indexes else range(min(len(value), MAX_ITEMS))
    for place in places:
        if place < len(value):
            fault = _fault(inner, value[place], (*path, place), set() if indexes else None)
            if fault is not None:
                return fault
    return None


def _fault_of_record(record: Any, value: dict[str, Any], path: Path) -> Fault | None:
    for name, annotation in _fields(record).items():
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
        records = [member for member in members if _is_record(member)]
        meant = _meant(records, value, path)
        if isinstance(meant, Fault):
            others = [member for member in members if not _is_record(member)]
            return None if any(_accepts(member, value) for member in others) else meant
        if meant:
            faults = [_fault(member, value, path) for member in meant]
            return None if None in faults and indexes is None else _furthest(faults)
    kind = json_type(value)
    literals = [x for m in members if get_origin(m) is Literal for x in get_args(m)]
    fitting = [m for m in members if _kind(m) in (kind, "")]
    if not isinstance(value, dict | list) and any(_accepts(m, value) for m in members):
        return None
    if literals and isinstance(value, str) and all(get_origin(m) is Literal for m in fitting):
        return Fault(path, f"must be {_one_of(literals)}")
    if not fitting:
        kinds = dict.fromkeys(filter(None, map(_kind, members)))
        wanted = [kind for kind in kinds if kind != "null"] or ["null"]
        return Fault(path, f"must be {' or '.join(wanted)}, not {json_type(value)}")
    faults = [_fault(member, value, path, indexes) for member in fitting]
    return None if None in faults else _furthest(faults)


def _meant(records: Sequence[Any], value: dict[str, Any], path: Path) -> list[Any] | Fault:
    """The records that an object can mean by its tags, or the fault of its tag."""
    if len(records) < 2:
        return list(records)
    tags = {tag: [_literals(record).get(tag) for record in records] for tag in TAGS}
    fits, open_to = [], []
    for place, record in enumerate(records):
        known = {tag: tags[tag][place] for tag in TAGS if tag in value}
        closed = {tag: values for tag, values in known.items() if values is not None}
        if any(value[tag] not in values for tag, values in closed.items()):
            continue
        has_tag = any(tag in _fields(record) for tag in known)
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


# --- what annotations say -------------------------------------------------------------------------


def _bare(annotation: Any) -> Any:
    """The type without what only wraps it."""
    while True:
        origin = get_origin(annotation)
        if origin is typing.Annotated or origin in _WRAPPERS:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, _ALIASES):
            annotation = annotation.__value__
        else:
            return annotation


def _item(annotation: Any) -> Any:
    """The type of the items of a list."""
    return (get_args(_bare(annotation)) or (Any,))[0]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def _members(union: Any) -> list[Any]:
    members: list[Any] = []
    for member in map(_bare, get_args(union)):
        members.extend(_members(member) if _is_union(member) else [member])
    return members


def _is_record(annotation: Any) -> bool:
    """Whether it is a class of objects: a model or a TypedDict."""
    is_class = isinstance(annotation, type) and get_origin(annotation) is None
    return is_class and (
        issubclass(annotation, BaseModel) or typing_extensions.is_typeddict(annotation)
    )


@lru_cache(maxsize=512)
def _fields(record: Any) -> Mapping[str, Any]:
    """The annotation of each field of a model or TypedDict, by the name that clients send."""
    if isinstance(record, type) and issubclass(record, BaseModel):
        return {info.alias or name: info.annotation for name, info in record.model_fields.items()}
    return typing_extensions.get_type_hints(record, include_extras=True)


@lru_cache(maxsize=512)
def _literals(record: Any) -> Mapping[str, tuple[Any, ...]]:
    """The values of each tag of a record that has only certain values."""
    found = {}
    for tag in TAGS:
        bare = _bare(_fields(record).get(tag))
        members = _members(bare) if _is_union(bare) else [bare]
        values = [x for m in members if get_origin(m) is Literal for x in get_args(m)]
        if values and all(get_origin(m) is Literal or m is type(None) for m in members):
            found[tag] = tuple(values)
    return found


def _kind(annotation: Any) -> str:
    """The JSON type of its values, in words; empty if it is not known."""
    origin = get_origin(annotation)
    if origin is Literal:
        return _KINDS.get(type(get_args(annotation)[0]), "")
    if _is_record(annotation) or annotation is dict or origin in (dict, Mapping):
        return "an object"
    if annotation in _LISTS or origin in _LISTS:
        return "a list"
    return _KINDS.get(annotation, "")


# --- what pydantic says ---------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    if _is_record(annotation):
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
