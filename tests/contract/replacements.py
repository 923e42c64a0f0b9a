"""The rows of all tables, and what a file of ours replaces in other packages, by its syntax tree.

An assignment to an attribute, by `=` or setattr, replaces something if

- the attribute is `__class__`, or setattr computes its name;
- what has the attribute is a class or module of another package;
- what has it is an object whose class our source states, and there it is a method or property;
- what has it is not `self`, and the value is a function, class or method of this file.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfg_core.compat.classes import evaluated, kind_of
from cfg_core.compat.reader import read
from cfg_core.patching import Row
from cfg_core.prefill_only import private_uses
from cfg_core.vllm_plugin import vllm_patches
from deployments import serve_patches

ROWS: list[Row] = [*vllm_patches.ROWS, *serve_patches.ROWS, *private_uses.USES]

COMPUTED = "a computed name"


@dataclass(frozen=True)
class Assignment:
    """owner: the expression that has the attribute."""

    owner: ast.expr
    attribute: str
    value: ast.expr | None
    line: int


def replaced(path: Path, module: str) -> set[str]:
    """The attributes that the file replaces. module: its dotted name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, uses = vars(importlib.import_module(module)), read(path, module)
    targets = {(use.where, use.target.split(":")[1].split(".")[-1]): use.target for use in uses}
    own = {node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    found = set()
    for made in assignments(tree, names):
        target = targets.get((f"{path.name}:{made.line}", made.attribute))
        if (
            made.attribute in ("__class__", COMPUTED)
            or _is_foreign(made.owner, names)
            or (target is not None and _is_method(target))
            or _is_ours(made, own)
        ):
            found.add(made.attribute)
    return found


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def assignments(tree: ast.Module, names: dict[str, Any]) -> Iterator[Assignment]:
    """All assignments to attributes. names: of the module, for constants given to setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _targets(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            yield from _targets(node.target, node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            owner, name, value = node.args
            if isinstance(name, ast.Name) and isinstance(names.get(name.id), str):
                name = ast.Constant(names[name.id])
            constant = name.value if isinstance(name, ast.Constant) else COMPUTED
            yield Assignment(owner, str(constant), value, node.lineno)


def _targets(target: ast.expr, value: ast.expr | None) -> Iterator[Assignment]:
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
        for part, own in zip(target.elts, values, strict=True):
            yield from _targets(part, own)
    elif isinstance(target, ast.Attribute):
        yield Assignment(target.value, target.attr, value, target.lineno)


def _is_foreign(owner: ast.expr, names: dict[str, Any]) -> bool:
    """Whether an expression is a class or module, and not one of ours."""
    found = evaluated(owner, names)
    if not (isinstance(found, type) or inspect.ismodule(found)):
        return False
    package = getattr(found, "__module__", None) or found.__name__
    return package.partition(".")[0] not in ("cfg_core", "deployments", names["__package__"])


def _is_method(target: str) -> bool:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return kind_of(inspect.getattr_static(owner, name, None)) is not None


def _is_ours(made: Assignment, own: set[str]) -> bool:
    if isinstance(made.owner, ast.Name) and made.owner.id == "self":
        return False
    value = made.value
    name = getattr(value, "id", getattr(value, "attr", None))
    return isinstance(value, ast.Lambda) or name in own
