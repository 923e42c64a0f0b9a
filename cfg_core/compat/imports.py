"""What a file of ours imports from other packages."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from cfg_core.compat import classes
from cfg_core.compat.uses import Use


def imported(tree: ast.Module, where: str) -> list[tuple[str, Any, Use]]:
    """For each imported name: the name in our file, what it is, and its use.

    where: the name of the file. What cannot be imported is None.
    """
    found: list[tuple[str, Any, Use]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if _is_read(alias.name)]
            found += [_module_import(alias, f"{where}:{node.lineno}") for alias in names]
        elif isinstance(node, ast.ImportFrom) and node.module and _is_read(node.module):
            found += _from_import(node, node.module, f"{where}:{node.lineno}")
    return found


def _module_import(alias: ast.alias, where: str) -> tuple[str, Any, Use]:
    """`import a.b` binds `a`; `import a.b as c` binds `c`, which is `a.b`."""
    found, problem = module(alias.name)
    top = alias.name.partition(".")[0]
    value = found if alias.asname else sys.modules.get(top)
    return alias.asname or top, value, Use(where, f"{alias.name}:", problem)


def _from_import(node: ast.ImportFrom, name: str, where: str) -> Iterator[tuple[str, Any, Use]]:
    source, broken = module(name)
    for alias in node.names:
        found, problem = getattr(source, alias.name, _MISSING), broken
        if source is None:
            found = None
        elif found is _MISSING:
            found = module(f"{name}.{alias.name}")[0]
            problem = f"{name} has no {alias.name}" if found is None else None
        yield alias.asname or alias.name, found, Use(where, f"{name}:{alias.name}", problem)


_MISSING = object()


def module(name: str) -> tuple[Any, str | None]:
    """The module, and no problem; or None, and why it cannot be imported."""
    try:
        return importlib.import_module(name), None
    except Exception as error:  # also what the module itself does wrong
        missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
        if missing and f"{name}.".startswith(f"{missing}."):
            return None, f"there is no module {name}"
        return None, f"{name} cannot be imported: {type(error).__name__}: {error}"


def _is_read(name: str) -> bool:
    return name.partition(".")[0] in classes.PACKAGES
