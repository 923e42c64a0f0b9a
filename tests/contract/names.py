"""Checks that the names of other packages which our source uses exist.

Nothing is listed by hand. `problems(path)` reads one file of ours and reports:

- an import of a module or name that does not exist;
- an attribute of `self` that neither our class nor a class it inherits from has;
- an attribute of an object whose annotation names a class of another package, if the class has no
  such attribute. Chains such as `self.kv_cache_manager.block_pool` are followed as far as the other
  package's own annotations and constructor calls give the types;
- an overriding method without `@override`, or one that cannot be called as the overridden one can.

So a foreign object is checked only where our source states its type: annotate it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOREIGN = ("vllm", "ray", "transformers", "uvicorn", "foreign")
"""Packages whose names are checked. The last one is made by the tests of this module."""


def problems(path: Path, module: str) -> list[str]:
    """The problems of one file, one sentence each. module: its dotted name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    reader = _Reader(tree, path.name)
    return [*reader.missing, *reader.attributes(), *overrides(importlib.import_module(module))]


def is_foreign(obj: Any) -> bool:
    return getattr(obj, "__module__", "").partition(".")[0] in FOREIGN


# --- what a class has -----------------------------------------------------------------------------


@functools.cache
def attributes_of(cls: type) -> set[str]:
    """The methods and annotations of a class, and all attributes that methods assign.

    Methods of its base classes count, too.
    """
    names = set(dir(cls)) | set(getattr(cls, "__dataclass_fields__", ()))
    names |= set(getattr(cls, "model_fields", ()))
    for base in cls.__mro__:
        names |= set(getattr(base, "__annotations__", ()))
        for node in ast.walk(_source_tree(base)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


@functools.cache
def attribute_type(cls: type, name: str) -> type | None:
    """The class of `cls().name`, as far as the sources give it. None if they do not."""
    for base in cls.__mro__:
        found = inspect.getattr_static(base, name, None)
        if isinstance(found, property):
            return _class_in(_hints(found.fget).get("return"))
        hint = _class_in(_hints(base).get(name))
        if hint is not None:
            return hint
        names = vars(sys.modules.get(base.__module__, object()))
        for node in ast.walk(_source_tree(base)):
            if isinstance(node, ast.AnnAssign) and _is_self(node.target, name):
                return _class_in(_evaluated(node.annotation, names))
            if isinstance(node, ast.Assign) and any(_is_self(t, name) for t in node.targets):
                value = node.value
                made = _evaluated(value.func, names) if isinstance(value, ast.Call) else None
                if isinstance(made, type):
                    return made
    return None


@functools.cache
def _source_tree(cls: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # built in, or written in C
        return ast.Module([], [])


def _hints(obj: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(obj)
    except Exception:  # names that exist for type checkers only
        return {}


def _class_in(hint: Any) -> type | None:
    """The one class in an annotation: `X`, `X | None`."""
    options = typing.get_args(hint) or (hint,)
    classes = [
        option for option in options if isinstance(option, type) and option is not type(None)
    ]
    return classes[0] if len(classes) == 1 and typing.get_origin(hint) in (None, *_UNIONS) else None


_UNIONS = (typing.Union, type(int | str))


def _evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    try:
        return eval(ast.unparse(node), dict(names))
    except Exception:
        return None


def _is_self(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


# --- what our source uses -------------------------------------------------------------------------


class _Reader:
    """One file of ours: its foreign names, and the attributes of foreign objects that it uses."""

    def __init__(self, tree: ast.Module, where: str) -> None:
        self._tree, self._where = tree, where
        self._foreign: dict[str, Any] = {}
        self.missing = list(self._imports())

    def _imports(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in FOREIGN and _module(alias.name) is None:
                        yield f"{self._where}:{node.lineno}: there is no module {alias.name}"
            elif isinstance(node, ast.ImportFrom) and (name := node.module or ""):
                yield from self._from(node, name) if name.partition(".")[0] in FOREIGN else ()

    def _from(self, node: ast.ImportFrom, name: str) -> Iterator[str]:
        module = _module(name)
        if module is None:
            yield f"{self._where}:{node.lineno}: there is no module {name}"
            return
        for alias in node.names:
            found = getattr(module, alias.name, None) or _module(f"{name}.{alias.name}")
            if found is None:
                yield f"{self._where}:{node.lineno}: {name} has no {alias.name}"
            self._foreign[alias.asname or alias.name] = found

    def attributes(self) -> Iterator[str]:
        """Uses of attributes that do not exist."""
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                yield from self._class(node)
            else:
                yield from self._uses(node, {})

    def _class(self, node: ast.ClassDef) -> Iterator[str]:
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
        for item in node.body:
            yield from self._uses(item, {}, members)

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
        return _class_in(_evaluated(annotation, {**vars(typing), **self._foreign}))

    def _uses(
        self, node: ast.AST, types: dict[str, Any], members: dict[str, Any] | None = None
    ) -> Iterator[str]:
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
            is_read = isinstance(node.ctx, ast.Load) and isinstance(owner, type)
            if is_read and is_foreign(owner) and node.attr not in attributes_of(owner):
                where = f"{self._where}:{node.lineno}"
                yield f"{where}: {owner.__module__}.{owner.__qualname__} has no {node.attr}"
        for child in ast.iter_child_nodes(node):
            yield from self._uses(child, types, members)

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


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            return None
        raise


# --- what our classes override --------------------------------------------------------------------


def overrides(module: Any) -> Iterator[str]:
    """The problems of the classes of `module` that inherit from foreign ones."""
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        foreign = [base for base in cls.__mro__[1:] if is_foreign(base)]
        if not foreign:
            continue
        yield from _methods(cls, foreign)
        yield from _self_uses(cls)


def _methods(cls: type, foreign: list[type]) -> Iterator[str]:
    for name, method in vars(cls).items():
        if name.startswith("__") or not inspect.isfunction(method):
            continue
        stock = next((vars(base)[name] for base in foreign if name in vars(base)), None)
        marked = getattr(method, "__override__", False)
        where = f"{cls.__module__}.{cls.__qualname__}.{name}"
        if stock is None:
            inherited = any(name in vars(base) for base in cls.__mro__[1:])
            if marked and not inherited:
                yield f"{where} overrides nothing"
            continue
        if not marked:
            yield f"{where} overrides a method of another package: mark it with @override"
        why = mismatch(method, inspect.unwrap(getattr(stock, "__func__", stock)))
        if why:
            yield f"{where}: {why}"


def mismatch(ours: Any, stock: Any) -> str | None:
    """Why `ours` cannot be called in all the ways in which `stock` can; None if it can."""
    mine, theirs = inspect.signature(ours).parameters, inspect.signature(stock).parameters
    kinds = {parameter.kind for parameter in mine.values()}
    takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    for name in theirs.keys() - mine.keys():
        if theirs[name].kind not in _VARIABLE and not takes_any:
            return f"the overridden method has a parameter {name}"
    for name in mine.keys() - theirs.keys():
        parameter = mine[name]
        if parameter.kind not in _VARIABLE and parameter.default is inspect.Parameter.empty:
            return f"the overridden method has no parameter {name}"
    shared = [name for name in mine if name in theirs]
    if shared != [name for name in theirs if name in mine]:
        return "its parameters have another order than those of the overridden method"
    return None


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _self_uses(cls: type) -> Iterator[str]:
    """Attributes of `self` that no class in the family has."""
    known = attributes_of(cls)
    for node in ast.walk(_source_tree(cls)):
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if is_read and getattr(node.value, "id", "") == "self" and node.attr not in known:
            yield f"{cls.__module__}.{cls.__qualname__} uses self.{node.attr}: nothing has it"
