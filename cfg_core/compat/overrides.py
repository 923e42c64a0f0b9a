"""What classes of ours use of the classes of other packages that they inherit from."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cfg_core.compat.classes import (
    attributes_of,
    function_of,
    is_foreign,
    kind_of,
    own_attributes,
    source_tree,
)
from cfg_core.compat.uses import Use, call_problem, called, mismatch, target_of


def of_module(module: ModuleType) -> Iterator[Use]:
    """The overrides, attributes of `self` and calls of `super()` in all classes of a module."""
    classes = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__
    ]
    for cls in classes:
        foreign = [base for base in cls.__mro__[1:] if is_foreign(base)]
        if foreign:
            yield from _methods(cls, foreign)
            yield from _self_uses(cls)
            yield from _super_calls(cls)
            if not any(other is not cls and issubclass(other, cls) for other in classes):
                yield from _not_implemented(cls)


def _where(cls: type, name: str) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{name}"


def _methods(cls: type, foreign: list[type]) -> Iterator[Use]:
    """The methods and properties of `cls`, and of its bases of ours in other modules."""
    for base in cls.__mro__:
        if base is cls or (_is_ours(base) and base.__module__ != cls.__module__):
            for name, member in vars(base).items():
                if not name.startswith("__") and kind_of(member) is not None:
                    yield from _override(cls, name, member, foreign)


def _is_ours(base: type) -> bool:
    """Whether it is neither of another package nor of Python, such as asyncio.Protocol."""
    return not is_foreign(base) and base.__module__.split(".")[0] not in sys.stdlib_module_names


def _override(cls: type, name: str, member: Any, foreign: list[type]) -> Iterator[Use]:
    owner = next((base for base in foreign if name in vars(base)), None)
    where = _where(cls, name)
    function = function_of(member)
    marked = any(getattr(part, "__override__", False) for part in (member, function))
    if owner is None:
        others = [base for base in cls.__mro__[1:] if vars(base).get(name) is not member]
        held = any(name in vars(base) for base in others) or (
            kind_of(member) == "property" and any(name in own_attributes(b) for b in foreign)
        )
        if marked and not held:
            yield Use(where, target_of(foreign[0], name), "overrides nothing", overrides=True)
        return
    if not marked:
        unmarked = "overrides a method of another package: mark it with @override"
        yield Use(where, target_of(owner, name), unmarked, overrides=True)
    yield Use(where, target_of(owner, name), misfit(member, vars(owner)[name]), overrides=True)


def misfit(ours: Any, stock: Any) -> str | None:
    """Why `ours` cannot stand where `stock` stands in a class; None if it can."""
    kinds = kind_of(ours), kind_of(stock)
    if kinds[0] != kinds[1]:
        return f"is a {kinds[0]}, and the overridden one a {kinds[1] or 'value'}"
    if kinds[0] == "property":
        return None
    mine, theirs = function_of(ours), function_of(stock)
    for what, test in _ASYNC.items():
        if test(theirs) and not test(mine):
            return f"the overridden method is {what}"
    return mismatch(inspect.signature(mine), inspect.signature(theirs))


_ASYNC = {
    "a coroutine": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}


def _self_uses(cls: type) -> Iterator[Use]:
    """Attributes of `self` that another package's class has, or no class in the family."""
    for node in ast.walk(source_tree(cls)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if getattr(node.value, "id", "") != "self":
            continue
        holder = next((base for base in cls.__mro__ if node.attr in own_attributes(base)), None)
        if holder is not None and is_foreign(holder):
            yield Use(_where(cls, node.attr), target_of(holder, node.attr))
        elif holder is None and node.attr not in attributes_of(cls):
            base = next(base for base in cls.__mro__ if is_foreign(base))
            problem = f"uses self.{node.attr}: nothing has it"
            yield Use(_where(cls, node.attr), target_of(base, node.attr), problem)


def _super_calls(cls: type) -> Iterator[Use]:
    """Calls of `super().name(...)` whose arguments do not fit."""
    for node in ast.walk(source_tree(cls)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        value, name = node.func.value, node.func.attr
        if not (isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super"):
            continue
        owner = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
        if owner is None or not is_foreign(owner):
            continue
        found = called(owner, name)
        problem = call_problem(node, found, bound=True) if found is not None else None
        yield Use(_where(cls, f"super().{name}"), target_of(owner, name), problem)


def _not_implemented(cls: type) -> Iterator[Use]:
    """Abstract methods of another package's class that `cls` lacks, so that it cannot be made."""
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if is_foreign(owner):
            yield Use(_where(cls, name), target_of(owner, name), "is abstract: implement it")
