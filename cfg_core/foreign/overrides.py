"""What classes of ours use of the classes of other packages that they inherit from."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from cfg_core.foreign.classes import attributes_of, is_foreign, own_attributes, source_tree
from cfg_core.foreign.uses import Use, call_problem, called, mismatch, target_of


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
    for name, method in vars(cls).items():
        if name.startswith("__") or not inspect.isfunction(method):
            continue
        owner = next((base for base in foreign if name in vars(base)), None)
        marked, where = getattr(method, "__override__", False), _where(cls, name)
        if owner is None:
            if marked and not any(name in vars(base) for base in cls.__mro__[1:]):
                yield Use(where, target_of(foreign[0], name), "overrides nothing", overrides=True)
            continue
        target = target_of(owner, name)
        if not marked:
            unmarked = "overrides a method of another package: mark it with @override"
            yield Use(where, target, unmarked, overrides=True)
        stock = vars(owner)[name]
        stock = inspect.unwrap(getattr(stock, "__func__", stock))
        problem = mismatch(inspect.signature(method), inspect.signature(stock))
        yield Use(where, target, problem, overrides=True)


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
        if owner is None or not is_foreign(owner) or name.startswith("__"):
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
