"""What the annotations of models and TypedDicts say of the JSON values that fit them.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import typing_extensions
from pydantic import BaseModel

TAGS = ("type", "role")
"""The fields that say which member of a union an object is."""

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


def unwrapped(annotation: Any) -> Any:
    """The type without what only wraps it."""
    while True:
        origin = get_origin(annotation)
        if origin is typing.Annotated or origin in _WRAPPERS:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, _ALIASES):
            annotation = annotation.__value__
        else:
            return annotation


def item_type(annotation: Any) -> Any:
    """The type of the items of a list."""
    return (get_args(unwrapped(annotation)) or (Any,))[0]


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def members_of(union: Any) -> list[Any]:
    members: list[Any] = []
    for member in map(unwrapped, get_args(union)):
        members.extend(members_of(member) if is_union(member) else [member])
    return members


def is_record(annotation: Any) -> bool:
    """Whether it is a class of objects: a model or a TypedDict."""
    is_class = isinstance(annotation, type) and get_origin(annotation) is None
    return is_class and (
        issubclass(annotation, BaseModel) or typing_extensions.is_typeddict(annotation)
    )


@lru_cache(maxsize=512)
def fields_of(record: Any) -> Mapping[str, Any]:
    """The annotation of each field of a model or TypedDict, by the name that clients send."""
    if isinstance(record, type) and issubclass(record, BaseModel):
        return {info.alias or name: info.annotation for name, info in record.model_fields.items()}
    return typing_extensions.get_type_hints(record, include_extras=True)


@lru_cache(maxsize=512)
def tags_of(record: Any) -> Mapping[str, tuple[Any, ...]]:
    """The values of each tag of a record that has only certain values."""
    found = {}
    for tag in TAGS:
        bare = unwrapped(fields_of(record).get(tag))
        members = members_of(bare) if is_union(bare) else [bare]
        values = [x for m in members if get_origin(m) is Literal for x in get_args(m)]
        if values and all(get_origin(m) is Literal or m is type(None) for m in members):
            found[tag] = tuple(values)
    return found


def json_type_of(annotation: Any) -> str:
    """The JSON type of its values, in words; empty if it is not known."""
    origin = get_origin(annotation)
    if origin is Literal:
        return _KINDS.get(type(get_args(annotation)[0]), "")
    if is_record(annotation) or annotation is dict or origin in (dict, Mapping):
        return "an object"
    if annotation in _LISTS or origin in _LISTS:
        return "a list"
    return _KINDS.get(annotation, "")
