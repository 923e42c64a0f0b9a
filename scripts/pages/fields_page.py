"""The tables of docs/request-fields.md and docs/engine-options.md, made from the code.

The text around the tables is in the pages. There, each table stands between two comments.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from page_tables import table, with_blocks

from cfg_core.params.field_table import Schema
from cfg_core.params.fields import AMBIGUOUS
from cfg_core.params.follower import USUAL_MAX_FOLLOWERS
from cfg_core.prefill_only import options
from cfg_core.vllm_plugin import guided_engine_args
from deployments.config.engine_keys import FRONTEND_KEYS, RESERVED_ENGINE_KEYS
from deployments.ingress.openapi.document import REPORT
from deployments.ingress.openapi.schemas import ENCODE, ENCODE_PATHS, GUIDANCE, SERVER

DOCS = Path(__file__).resolve().parents[2] / "docs"
REQUESTS, ENGINE = DOCS / "request-fields.md", DOCS / "engine-options.md"


# ---- tables --------------------------------------------------------------------------------------


def of_schemas(fields: Mapping[str, Schema], required: Iterable[str] = ()) -> str:
    """A table of fields with JSON schemas."""
    rows = (
        (f"`{name}`", type_of(schema), default_of(schema, name in required), meaning_of(schema))
        for name, schema in fields.items()
    )
    return table(("field", "type", "default", "meaning"), rows)


def type_of(schema: Schema) -> str:
    """The type of a JSON schema in words."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "oneOf" in schema:
        return " or ".join(dict.fromkeys(type_of(one) for one in schema["oneOf"]))
    if schema.get("type") == "array":
        return f"list of {_plural(schema.get('items', {}))}"
    names = {"string": "text", "object": "object", "null": "none", "boolean": "true or false"}
    kind = str(schema.get("type", "any"))
    return names.get(kind, kind)


def _plural(items: Schema) -> str:
    if "minItems" in items:
        return f"lists of {items['minItems']} {_plural(items['items'])}"
    words = {"string": "texts", "object": "objects", "integer": "integers", "number": "numbers"}
    inner = type_of(items)
    return words.get(items.get("type", ""), f"({inner})" if " " in inner else inner)


def default_of(schema: Schema, is_needed: bool) -> str:
    if "default" not in schema:
        return "needed" if is_needed else "-"
    return f"`{str(schema['default']).lower()}`"


def meaning_of(schema: Schema) -> str:
    return str(schema.get("description", "")).replace("|", "\\|")


def streams() -> str:
    """The keys of one entry of `guidance_streams`."""
    items = GUIDANCE["guidance_streams"]["items"]
    return of_schemas(items["properties"], items["required"])


def common() -> dict[str, Schema]:
    """The fields that all endpoints of encoders have."""
    first, *others = (schema["properties"] for schema in ENCODE.values())
    return {name: schema for name, schema in first.items() if all(name in x for x in others)}


def encoders() -> str:
    """A table for the common fields, and one for each endpoint of encoders."""
    parts = ["### All of them", of_schemas(common())]
    for endpoint, schema in ENCODE.items():
        paths = ", ".join(f"`{path}`" for path, named in ENCODE_PATHS.items() if named == endpoint)
        own = {k: v for k, v in schema["properties"].items() if k not in common()}
        parts += [f"### {endpoint}\n{paths}", of_schemas(own, schema["required"])]
    return "\n\n".join(parts)


def report() -> str:
    rows = (
        (f"`{name}`", type_of(schema), meaning_of(schema))
        for name, schema in REPORT["properties"].items()
    )
    return table(("key", "type", "meaning"), rows)


def refused() -> str:
    return table(("name",), ((f"`{name}`",) for name in AMBIGUOUS))


def guided_options() -> str:
    """The arguments of `guided_engine_args`, with what its docstring says of each."""
    described = described_arguments(inspect.getdoc(guided_engine_args) or "")
    used = {"draft_cost": "measured", "max_followers": f"`{USUAL_MAX_FOLLOWERS}`"}
    rows = []
    for name, parameter in inspect.signature(guided_engine_args).parameters.items():
        value = parameter.default
        default = used.get(name, "none" if value is None else f"`{str(value).lower()}`")
        rows.append((f"`{name}`", default, described[name]))
    return table(("argument", "default", "meaning"), rows)


def described_arguments(doc: str) -> dict[str, str]:
    """What a docstring says of each argument, as one line: `name: text`, continued indented."""
    found = re.findall(r"^(\w+): (.*(?:\n    .*)*)", doc, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def reserved() -> str:
    rows = ((f"`{name}`", instead) for name, instead in RESERVED_ENGINE_KEYS.items())
    return table(("key", "instead"), rows)


def frontend() -> str:
    return table(("key",), ((f"`{name}`",) for name in sorted(FRONTEND_KEYS)))


def encoder_options() -> str:
    """The fields of EncoderOptions with the texts that stand below them in the source."""
    texts = attribute_texts(Path(options.__file__), options.EngineOptions.__name__)
    rows = []
    for field in dataclasses.fields(options.EngineOptions):
        value = "none" if field.default is None else f"`{str(field.default).lower()}`"
        default = "`{}`" if field.default is dataclasses.MISSING else value
        rows.append((f"`{field.name}`", default, texts[field.name]))
    return table(("key", "default", "meaning"), rows)


def attribute_texts(source: Path, name: str) -> dict[str, str]:
    """The texts below the attributes of a class, each as one line."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (found,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)
    texts: dict[str, str] = {}
    for this, after in zip(found.body, found.body[1:], strict=False):
        if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name):
            assert isinstance(after, ast.Expr), this.target.id
            text = ast.literal_eval(after.value)
            texts[this.target.id] = " ".join(text.split())
    return texts


# ---- pages ---------------------------------------------------------------------------------------

TABLES: dict[Path, dict[str, Callable[[], Any]]] = {
    REQUESTS: {
        "guidance": lambda: of_schemas(GUIDANCE),
        "streams": streams,
        "refused": refused,
        "server": lambda: of_schemas(SERVER),
        "report": report,
        "encoders": encoders,
    },
    ENGINE: {
        "guided": guided_options,
        "reserved": reserved,
        "frontend": frontend,
        "encoder": encoder_options,
    },
}
"""The marks of each page, with what makes the table after each."""


def page(path: Path, text: str) -> str:
    """A page with all tables up to date, made from its present `text`."""
    return with_blocks(text, {name: made() for name, made in TABLES[path].items()})
