"""Reads one file of ours: every use of another package's names.

- imports;
- attributes of `self` in classes that inherit from a class of another package;
- attributes of objects whose annotation names such a class. Chains such as
  `self.kv_cache_manager.block_pool` are followed as far as the other package's own annotations and
  constructor calls give the types;
- calls of what was found in these ways, whose arguments must fit;
- overriding methods, which must be marked with `@override` and be callable as the overridden ones.

So an object of another package is checked only where our source states its type: annotate it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cfg_core.foreign import classes
from cfg_core.foreign.classes import attribute_type, class_in, evaluated, is_foreign
from cfg_core.foreign.overrides import of_module
from cfg_core.foreign.uses import Use, call_problem, called, target_of


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
        self._foreign: dict[str, Any] = {}
        self.imports = list(self._imports())

    def _at(self, node: Any) -> str:
        return f"{self._where}:{node.lineno}"

    def _imports(self) -> Iterator[Use]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _is_read(alias.name):
                        missing = _module(alias.name) is None
                        problem = f"there is no module {alias.name}" if missing else None
                        yield Use(self._at(node), f"{alias.name}:", problem)
            elif isinstance(node, ast.ImportFrom) and node.module and _is_read(node.module):
                yield from self._from(node, node.module)

    def _from(self, node: ast.ImportFrom, name: str) -> Iterator[Use]:
        module = _module(name)
        for alias in node.names:
            target = f"{name}:{alias.name}"
            if module is None:
                yield Use(self._at(node), target, f"there is no module {name}")
                continue
            found = getattr(module, alias.name, None) or _module(f"{name}.{alias.name}")
            self._foreign[alias.asname or alias.name] = found
            missing = f"{name} has no {alias.name}"
            yield Use(self._at(node), target, missing if found is None else None)

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
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = self._type_of(node.value, types, members)
            if isinstance(owner, type) and is_foreign(owner):
                yield self._attribute(node, owner)
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

    def _call(
        self, node: ast.Call, types: dict[str, Any], members: dict[str, Any] | None
    ) -> Iterator[Use]:
        owner: Any = None
        name, found = "", None
        if isinstance(node.func, ast.Name) and node.func.id not in types:
            found, name = self._foreign.get(node.func.id), node.func.id
            owner = inspect.getmodule(found) if found is not None else None
        elif isinstance(node.func, ast.Attribute):
            owner, name = self._type_of(node.func.value, types, members), node.func.attr
            found = called(owner, name) if isinstance(owner, type) else None
        if owner is not None and found is not None and is_foreign(owner):
            problem = call_problem(node, found, bound=isinstance(owner, type))
            if problem is not None:
                yield Use(self._at(node), target_of(owner, name), problem)

    def _type_of(
        self, node: ast.expr, types: dict[str, Any], members: dict[str, Any] | None
    ) -> type | None:
        if isinstance(node, ast.Name):
            return types.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self" and members:
            return members.get(node.attr)
        owner = self._type_of(node.value, types, members)
        return attribute_type(owner, node.attr) if isinstance(owner, type) else None


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_read(module: str) -> bool:
    return module.partition(".")[0] in classes.PACKAGES


def _module(name: str) -> Any:
    """The module, or None if it does not exist. Its own failed imports are raised."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            return None
        raise
