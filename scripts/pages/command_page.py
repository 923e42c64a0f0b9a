"""The tables of docs/command.md, made from the command itself.

The text around the tables is in docs/command.md. There, each table stands between two comments.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from page_tables import table as markdown_table
from page_tables import with_blocks

from cfg_core.prefill_only.__main__ import parser
from cfg_serve.cli import app

Row = tuple[str, str, str]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command.md"
HEAD = ("option", "default", "meaning")
WITHOUT_OPTIONS = ("bench",)
OF_THE_MACHINE = ("--threads",)
"""Options whose default depends on the machine."""


def commands() -> dict[str, Any]:
    """The subcommands, as click has them."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def table(name: str) -> str:
    """The options of a subcommand, as Markdown."""
    rows = _of_parser() if name == "embed" else _of_click(commands()[name])
    return markdown_table(HEAD, rows)


def _of_click(command: Any) -> Iterator[Row]:
    for parameter in command.params:
        names = ", ".join(f"`{name}`" for name in _names(parameter))
        variable = f" Environment: `{parameter.envvar}`." if parameter.envvar else ""
        meaning = getattr(parameter, "help", "") or ""
        yield _row(names, _default(parameter), f"{meaning}{variable}")


def _names(parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [parameter.metavar or parameter.name.upper()]
    return [*parameter.opts, *parameter.secondary_opts]


def _default(parameter: Any) -> str:
    return "" if callable(parameter.default) else _shown(parameter.default)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value in (None, (), "") else f"`{value}`"


def _of_parser() -> Iterator[Row]:
    """The options of `embed`, which has a parser of its own."""
    groups = [x for x in parser()._actions if isinstance(x, argparse._SubParsersAction)]
    for action in groups[0].choices["embed"]._actions:
        if action.dest == "help":
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings or [action.dest.upper()])
        value = "all cores" if set(action.option_strings) & set(OF_THE_MACHINE) else action.default
        shown = _shown(value) if value != "all cores" else value
        yield _row(names, shown, _sentence(re.sub(r" \(default: .*\)$", "", action.help or "")))


def _sentence(text: str) -> str:
    """With a capital, if it does not begin with a value or the end of a name."""
    return text if text.startswith(("auto", ".")) else text[:1].upper() + text[1:]


def _row(names: str, default: str, meaning: str) -> Row:
    end = "" if not meaning or meaning.endswith(".") else "."
    return names.replace("|", "\\|"), default, f"{meaning}{end}"


def page(text: str) -> str:
    """The page with all tables up to date, made from its present `text`."""
    return with_blocks(text, {n: table(n) for n in commands() if n not in WITHOUT_OPTIONS})
