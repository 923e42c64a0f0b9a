"""Use: one place of our source that uses a name of another package."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Use:
    """One use.

    where: file and line of ours, or our class and method.
    target: what is used, as `package.module:Class.name` or `package.module:name`.
    problem: why the installed package does not allow it; None if it does.
    overrides: whether our method replaces the target, so that its body matters too.
    """

    where: str
    target: str
    problem: str | None = None
    overrides: bool = False


def target_of(owner: Any, name: str) -> str:
    """The text for `name` in the class or module `owner`."""
    if inspect.ismodule(owner):
        return f"{owner.__name__}:{name}"
    return f"{owner.__module__}:{owner.__qualname__}.{name}"


def mismatch(ours: inspect.Signature, stock: inspect.Signature) -> str | None:
    """Why `ours` cannot be called in all the ways in which `stock` can; None if it can."""
    mine, theirs = ours.parameters, stock.parameters
    kinds = {parameter.kind for parameter in mine.values()}
    for name in [name for name in theirs if name not in mine]:
        if not _ways(theirs[name]) <= kinds:
            return f"the overridden method has a parameter {name}"
    for name in [name for name in mine if name not in theirs]:
        if _ways(mine[name]) and mine[name].default is _EMPTY:
            return f"the overridden method has no parameter {name}"
    shared = [name for name in mine if name in theirs]
    if shared != [name for name in theirs if name in mine]:
        return "its parameters have another order than those of the overridden method"
    for name in shared:
        if not _ways(theirs[name]) <= _ways(mine[name]) | kinds:
            return f"its parameter {name} cannot be passed as that of the overridden method"
        if mine[name].default is _EMPTY and theirs[name].default is not _EMPTY:
            return f"the overridden method may be called without {name}"
    return None


_EMPTY = inspect.Parameter.empty
_WAYS: dict[Any, set[Any]] = {
    inspect.Parameter.POSITIONAL_ONLY: {inspect.Parameter.VAR_POSITIONAL},
    inspect.Parameter.KEYWORD_ONLY: {inspect.Parameter.VAR_KEYWORD},
    inspect.Parameter.POSITIONAL_OR_KEYWORD: {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    },
}


def _ways(parameter: inspect.Parameter) -> set[Any]:
    """How an argument is passed to `parameter`, as the kinds that take any such arguments.

    Empty for `*args` and `**kwargs` themselves.
    """
    return _WAYS.get(parameter.kind, set())


def called(owner: type, name: str) -> Any:
    """The function or class that a call of `owner().name` runs; None if that is not known."""
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, classmethod | staticmethod):
        return None  # binding them differs, and they are rare
    return found if inspect.isfunction(found) else None


def call_problem(node: ast.Call, function: Any, *, bound: bool) -> str | None:
    """Why the arguments of a call do not fit `function`; None if they do, or if it is not known.

    bound: whether `function` takes `self` before the arguments.
    """
    starred = any(isinstance(arg, ast.Starred) for arg in node.args)
    if starred or any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return None
    positional = [None] * (len(node.args) + bound)
    try:
        signature.bind(*positional, **{str(k.arg): None for k in node.keywords})
    except TypeError as error:
        return f"is called with other arguments than it takes: {error}"
    return None
