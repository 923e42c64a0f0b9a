"""What a function of another package calls, from its syntax tree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def nodes(function: Callable[..., Any]) -> list[ast.AST]:
    """All nodes of a function. Decorators are looked through."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    return [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))]


def calls(function: Callable[..., Any]) -> list[ast.Call]:
    """In the order of the source."""
    found = [node for node in nodes(function) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def called(function: Callable[..., Any]) -> list[str]:
    """What is called, as it is written: `self.model.compute_logits`."""
    return [ast.unparse(node.func) for node in calls(function)]
