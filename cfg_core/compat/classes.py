"""What the classes of other packages have, as far as their sources tell."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import typing
from typing import Any

PACKAGES = ["vllm", "ray", "transformers", "uvicorn"]
"""The packages whose names are read."""


def is_foreign(obj: Any) -> bool:
    """Whether a class, function or module belongs to one of PACKAGES."""
    name = getattr(obj, "__module__", None) or getattr(obj, "__name__", "")
    return str(name).partition(".")[0] in PACKAGES


def kind_of(member: Any) -> str | None:
    """What an entry of a class is: a kind of method, or a property. None if it is a value."""
    for kind, types in _KINDS.items():
        if isinstance(member, types):
            return kind
    return "method" if inspect.isfunction(member) else None


_KINDS: dict[str, Any] = {
    "class method": classmethod,
    "static method": staticmethod,
    "property": (property, functools.cached_property),
}


def function_of(member: Any) -> Any:
    """The function behind an entry of a class, without its decorators; else the entry itself."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    return inspect.unwrap(member) if callable(member) else member


@functools.cache
def attributes_of(cls: type) -> frozenset[str]:
    """The methods and annotations of a class and its bases, and all attributes that methods set."""
    return frozenset(dir(cls)).union(*(own_attributes(base) for base in cls.__mro__))


@functools.cache
def own_attributes(cls: type) -> frozenset[str]:
    """As attributes_of, without those that only a base class has."""
    names = {*vars(cls), *getattr(cls, "__annotations__", ())}
    names |= set(getattr(cls, "__dataclass_fields__", ())) | set(getattr(cls, "model_fields", ()))
    for node in ast.walk(source_tree(cls)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(names)


@functools.cache
def attribute_type(cls: type, name: str) -> type | None:
    """The class of `cls().name`, as far as the sources give it. None if they do not."""
    for base in cls.__mro__:
        found = inspect.getattr_static(base, name, None)
        if isinstance(found, property):
            return class_in(_hints(found.fget).get("return"))
        hint = class_in(_hints(base).get(name))
        if hint is not None:
            return hint
        names = vars(sys.modules.get(base.__module__, object()))
        node = assignment(base, name)
        if isinstance(node, ast.AnnAssign):
            return class_in(evaluated(node.annotation, names))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = evaluated(node.value.func, names)
            if isinstance(made, type):
                return made
    return None


@functools.cache
def assignment(cls: type, name: str) -> ast.AnnAssign | ast.Assign | None:
    """Where the source of `cls` sets `self.name`.

    Of several places, one with an annotation is preferred, then one that calls something.
    """
    found: ast.Assign | None = None
    for node in ast.walk(source_tree(cls)):
        if isinstance(node, ast.AnnAssign) and _is_self(node.target, name):
            return node
        if isinstance(node, ast.Assign) and any(_is_self(t, name) for t in node.targets):
            better = isinstance(node.value, ast.Call) and not isinstance(
                found and found.value, ast.Call
            )
            found = node if found is None or better else found
    return found


@functools.cache
def source_tree(obj: Any) -> ast.AST:
    """The syntax tree of a class or function; an empty one if it has no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(obj)))
    except (OSError, TypeError, SyntaxError):  # built in, or written in C
        return ast.Module([], [])


def class_in(hint: Any) -> type | None:
    """The one class in an annotation: `X`, `X | None`."""
    options = typing.get_args(hint) or (hint,)
    classes = [
        option for option in options if isinstance(option, type) and option is not type(None)
    ]
    return classes[0] if len(classes) == 1 and typing.get_origin(hint) in (None, *_UNIONS) else None


_UNIONS = (typing.Union, type(int | str))


def evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression in the namespace `names`; None if it cannot be evaluated."""
    try:
        return eval(ast.unparse(node), dict(names))
    except Exception:
        return None


def _hints(obj: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(obj)
    except Exception:  # names that exist for type checkers only
        return {}


def _is_self(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
