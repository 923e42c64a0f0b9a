"""Reads one file of ours: every use of another package's names.

- imports;
- attributes of imported classes and modules, such as the members of an Enum;
- attributes of `self` in classes that inherit from a class of another package;
- attributes of objects whose annotation names such a class, read or set. Chains such as
  `self.kv_cache_manager.block_pool` are followed as far as the other package's own annotations and
  constructor calls give the types;
- calls of what was found in these ways, whose arguments must fit;
- overriding methods, which must be marked with `@override` and be callable as the overridden ones.

So an object of another package is checked only where our source states its type: annotate it.
Elements of lists and dictionaries are not read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfg_core.compat import classes
from cfg_core.compat.classes import attribute_type, class_in, evaluated, is_foreign
from cfg_core.compat.imports import imported, module
from cfg_core.compat.overrides import of_module
from cfg_core.compat.uses import Use, call_problem, called, target_of


def read(path: Path, module: str) -> list[Use]:
    """The uses in one file. module: its dotted name.

    Raises ImportError if the file cannot be imported. `imports` tells why.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    reader = _Reader(tree, path.name)
    return [*reader.imports, *reader.attributes(), *of_module(importlib.import_module(module))]


def imports(path: Path) -> list[Use]:
    """The imports of one file, which need not be importable."""
    return _Reader(ast.parse(path.read_text(encoding="utf-8")), path.name).imports


class _Reader:
    """One file of ours: its foreign names, and the attributes of foreign objects that it uses."""

    def __init__(self, tree: ast.Module, where: str) -> None:
        self._tree, self._where = tree, where
        found = imported(tree, where)
        self.imports = [use for _, _, use in found]
        self._foreign: dict[str, Any] = {name: value for name, value, _ in found}

    def _at(self, node: Any) -> str:
        return f"{self._where}:{node.lineno}"

    def attributes(self) -> Iterator[Use]:
        """Attributes and calls."""
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                yield from self._class(node)
            else:
                yield from self._uses(node, {})

    def _class(self, node: ast.ClassDef) -> Iterator[Use]:
        members = {
            item.target.id: self._annotated(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for item in ast.walk(node):  # `self._manager = manager`, where the parameter is annotated
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                members |= self._kept(item)
                if any(getattr(d, "id", "") == "property" for d in item.decorator_list):
                    members[item.name] = self._annotated(item.returns)
        members = {name: cls for name, cls in members.items() if cls is not None}
        for part in node.body:
            yield from self._uses(part, {}, members)

    def _kept(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
        types = self._parameters(function)
        assigned = (item for item in ast.walk(function) if isinstance(item, ast.Assign))
        return {
            target.attr: types[value.id]
            for item in assigned
            for target, value in _pairs(item)
            if isinstance(target, ast.Attribute)
            and isinstance(value, ast.Name)
            and getattr(target.value, "id", "") == "self"
            and value.id in types
        }

    def _parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        found = {a.arg: self._annotated(a.annotation) for a in arguments if a.annotation}
        return {name: cls for name, cls in found.items() if cls is not None}

    def _annotated(self, annotation: ast.expr | None) -> type | None:
        if annotation is None:
            return None
        return class_in(evaluated(annotation, {**vars(typing), **self._foreign}))

    def _uses(
        self, node: ast.AST, types: dict[str, Any], members: dict[str, Any] | None = None
    ) -> Iterator[Use]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            types = {**types, **self._parameters(node)}
            for item in ast.walk(node):
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    types[item.target.id] = self._annotated(item.annotation)
                elif isinstance(item, ast.Assign):
                    for target, value in _pairs(item):
                        if isinstance(target, ast.Name):
                            types.setdefault(target.id, self._type_of(value, types, members))
        if isinstance(node, ast.Attribute):
            owner = self._type_of(node.value, types, members)
            if isinstance(owner, type) and is_foreign(owner):
                yield self._attribute(node, owner)
            elif isinstance(owner, _Named) and is_foreign(owner.what):
                yield self._named(node, owner.what)
        if isinstance(node, ast.Call):
            yield from self._call(node, types, members)
        for child in ast.iter_child_nodes(node):
            yield from self._uses(child, types, members)

    def _attribute(self, node: ast.Attribute, owner: type) -> Use:
        holder = next((b for b in owner.__mro__ if node.attr in classes.own_attributes(b)), None)
        if holder is None and node.attr not in classes.attributes_of(owner):
            problem = f"{owner.__module__}.{owner.__qualname__} has no {node.attr}"
            return Use(self._at(node), target_of(owner, node.attr), problem)
        return Use(self._at(node), target_of(holder or owner, node.attr))

    def _named(self, node: ast.Attribute, owner: Any) -> Use:
        """An attribute of an imported class or module."""
        if isinstance(owner, type):
            return self._attribute(node, owner)
        found = hasattr(owner, node.attr) or module(f"{owner.__name__}.{node.attr}")[0]
        missing = f"{owner.__name__} has no {node.attr}"
        return Use(self._at(node), target_of(owner, node.attr), None if found else missing)

    def _call(
        self, node: ast.Call, types: dict[str, Any], members: dict[str, Any] | None
    ) -> Iterator[Use]:
        owner: Any = None
        name, found, bound = "", None, False
        if isinstance(node.func, ast.Name) and node.func.id not in types:
            found, name = self._foreign.get(node.func.id), node.func.id
            owner = inspect.getmodule(found) if found is not None else None
        elif isinstance(node.func, ast.Attribute):
            owner, name = self._type_of(node.func.value, types, members), node.func.attr
            if isinstance(owner, type):
                found, bound = called(owner, name), True
            elif isinstance(owner, _Named):
                owner = owner.what
                found = None if isinstance(owner, type) else getattr(owner, name, None)
        if owner is not None and callable(found) and is_foreign(owner):
            problem = call_problem(node, found, bound=bound)
            if problem is not None:
                yield Use(self._at(node), target_of(owner, name), problem)

    def _type_of(
        self, node: ast.expr, types: dict[str, Any], members: dict[str, Any] | None
    ) -> type | _Named | None:
        """The class of an expression's value; _Named if it is an imported class or module."""
        if isinstance(node, ast.Name):
            if node.id in types:
                found: type | None = types[node.id]
                return found
            return _named(self._foreign.get(node.id))
        if isinstance(node, ast.Call):
            made = self._type_of(node.func, types, members)
            return made.what if isinstance(made, _Named) and isinstance(made.what, type) else None
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self" and members:
            return members.get(node.attr)
        owner = self._type_of(node.value, types, members)
        if isinstance(owner, _Named):
            return _named(getattr(owner.what, node.attr, None))
        return attribute_type(owner, node.attr) if isinstance(owner, type) else None


@dataclass(frozen=True)
class _Named:
    """A class or module itself, and not an instance of the class."""

    what: Any


def _named(found: Any) -> type | _Named | None:
    """For a class or module, _Named; for another object of another package, its class."""
    if isinstance(found, type) or inspect.ismodule(found):
        return _Named(found)
    return type(found) if is_foreign(type(found)) else None


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value
