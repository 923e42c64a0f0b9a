"""Write the tables of docs/configuration.md from the pydantic models that read the YAML.

    python scripts/config_page.py

The text around the tables is in docs/configuration.md itself. There, each table stands between two
comments.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deployments.config.access import AccessArgs, KeyArgs
from deployments.config.admission import AdmissionArgs
from deployments.config.args import AppArgs
from deployments.config.base import YamlArgs
from deployments.config.encoders import EncoderArgs
from deployments.config.fallback import FallbackArgs
from deployments.config.grammars import GrammarArgs
from deployments.config.http import HttpArgs
from deployments.config.limits import LimitsArgs
from deployments.config.tracing import TracingArgs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
SECTIONS = (
    *(AppArgs, FallbackArgs, EncoderArgs, AdmissionArgs, AccessArgs, KeyArgs, LimitsArgs),
    HttpArgs,
    GrammarArgs,
    TracingArgs,
)


def table(section: type[YamlArgs]) -> str:
    """The keys of one section, as Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{name}` | {_default(field)} | {field.description} |"
        for name, field in section.model_fields.items()
    ]
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined:
        value = None if field.default_factory is None else {}
        return "needed" if field.is_required() else "none"
    if value is None or isinstance(value, YamlArgs) or value == ():
        return "none" if value is None or value == () else "see below"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def page(text: str) -> str:
    """The page with all tables up to date, made from its present `text`."""
    for section in SECTIONS:
        text = with_table(text, section)
    return text


def with_table(text: str, section: type[YamlArgs]) -> str:
    """Return `text` with the table of one section up to date."""
    mark = re.compile(rf"(<!-- {section.section} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert mark.search(text), f"docs/configuration.md has no table for {section.section}"
    return mark.sub(lambda m: f"{m[1]}{table(section)}\n{m[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
