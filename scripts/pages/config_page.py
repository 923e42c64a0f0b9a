"""The tables of docs/configuration.md, made from the classes that read the YAML.

The text around the tables is in docs/configuration.md itself. There, each table stands between two
comments. What a key means is the text below it in its class.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pydantic
from page_tables import table as markdown_table
from page_tables import with_blocks
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cfg_core.grammars.trials import GrammarLimits
from deployments.config.access import AccessArgs, KeyArgs
from deployments.config.admission import AdmissionArgs
from deployments.config.args import AppArgs
from deployments.config.base import YamlArgs
from deployments.config.encoders import EncoderArgs
from deployments.config.generators import FallbackArgs, ModelArgs
from deployments.config.http import HttpArgs
from deployments.config.limits import LimitsArgs
from deployments.config.tracing import TracingArgs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
MODELS: tuple[type[YamlArgs], ...] = (
    *(AppArgs, ModelArgs, FallbackArgs, EncoderArgs, AdmissionArgs, AccessArgs, KeyArgs, HttpArgs),
    TracingArgs,
)
SECTIONS: dict[str, type] = {
    **{model.section: model for model in MODELS},
    "limits": LimitsArgs,
    "grammars": GrammarLimits,
}


def fields_of(section: type) -> Mapping[str, FieldInfo]:
    """The keys of a section, which is a model or a dataclass."""
    read: Any = section
    if not hasattr(read, "__pydantic_fields__"):
        read = pydantic.dataclasses.dataclass(frozen=True)(section)
    fields: Mapping[str, FieldInfo] = read.__pydantic_fields__
    return fields


def meanings_of(section: type) -> Mapping[str, str]:
    """What each key means: the texts below the fields of a class and of its bases."""
    found = {}
    for cls in section.__mro__:
        if "__annotations__" not in vars(cls):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def table(section: type) -> str:
    """The keys of one section, as Markdown."""
    meanings = meanings_of(section)
    rows = (
        (f"`{name}`", _default(field), meanings[name]) for name, field in fields_of(section).items()
    )
    return markdown_table(("key", "default", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined:
        value = None if field.default_factory is None else {}
        return "needed" if field.is_required() else "none"
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple(SECTIONS.values())):
        return "see below"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def page(text: str) -> str:
    """The page with all tables up to date, made from its present `text`."""
    return with_blocks(text, {name: table(section) for name, section in SECTIONS.items()})
