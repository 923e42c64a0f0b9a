"""What each used name of another package is, as text, so that two versions can be compared."""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from cfg_core.compat.classes import (
    assignment,
    function_of,
    kind_of,
    own_attributes,
    source_tree,
)


@dataclass(frozen=True, slots=True)
class Description:
    """shape: signature, annotation or value; body: a digest of a function's statements, or empty.

    The digest leaves out comments and docstrings.
    """

    shape: str
    body: str = ""


MISSING = Description("missing")


def describe(target: str) -> Description:
    """Describe `package.module:Class.name`, `package.module:name` or `package.module:`."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError:
        return MISSING
    if not path:
        return Description("module")
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
        if owner is None:
            return MISSING
    if inspect.ismodule(owner):
        return _described(vars(owner).get(name), _has_module(module_name, name))
    return _member(owner, name)


def _has_module(package: str, name: str) -> Description:
    try:
        importlib.import_module(f"{package}.{name}")
    except ImportError:
        return MISSING
    return Description("module")


def _member(cls: type, name: str) -> Description:
    if name in vars(cls):
        found = vars(cls)[name]
        if kind_of(found) is not None:
            return _described(function_of(found), MISSING, kind_of(found) or "")
    annotation = inspect.get_annotations(cls).get(name)
    if annotation is not None:
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        return Description(f"attribute: {text}")
    node = assignment(cls, name)
    if isinstance(node, ast.AnnAssign):
        return Description(f"attribute: {ast.unparse(node.annotation)}")
    if isinstance(node, ast.Assign):
        value = node.value
        text = f"{ast.unparse(value.func)}(...)" if isinstance(value, ast.Call) else "assigned"
        return Description(f"attribute: {text}")
    if name in vars(cls):
        return _described(vars(cls)[name], Description("constant: NoneType"))
    holder = next((base for base in cls.__mro__ if name in own_attributes(base)), None)
    return MISSING if holder is None else Description(f"inherited from {holder.__qualname__}")


def _described(found: Any, otherwise: Description, kind: str = "function") -> Description:
    """Describe a function, class, module or constant; `otherwise` if it is None.

    kind: of the function (`classes.kind_of`).
    """
    if found is None:
        return otherwise
    if inspect.ismodule(found):
        return Description("module")
    function = inspect.unwrap(found) if callable(found) else found
    if inspect.isfunction(function):
        word = {"function": "", "method": ""}.get(kind, f"{kind}: ")
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        start = "async " if is_async else ""
        return Description(f"{word}{start}def {_signature(function)}", _digest(function))
    if inspect.isclass(found):
        return Description("class")  # its attributes and the calls of it are uses of their own
    return Description(f"constant: {type(found).__name__}")


def _signature(obj: Any) -> str:
    """The parameters without annotations, which change more often than what may be passed."""
    try:
        parameters = inspect.signature(obj).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    empty = inspect.Parameter.empty
    bare = (
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else ...)
        for parameter in parameters
    )
    return f"({', '.join(str(parameter).replace('Ellipsis', '...') for parameter in bare)})"


def _digest(function: Any) -> str:
    tree = copy.deepcopy(source_tree(function))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            body.pop(0)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
