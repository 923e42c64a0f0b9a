"""Parameters of a tool between XML marks, as Qwen3-Coder, Qwen3.5 and MiniMax write them.

    <parameter=city>
    Paris
    </parameter>

The parameters have the order of the schema, and those that are not required may be left out. Text
stands as it is, other values as JSON. White space around values does not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cfg_core.grammars.schemas import closed
from cfg_core.vllm_plugin.grammar_helper.lark_text import JsonWhitespace, escaped, unknown

MARKS = {
    "qwen_xml": ("<parameter={}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{}">', "</parameter>"),
}
"""What stands before and after a value, by the style of the format."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_TEXT = frozenset({"type", "minLength", "maxLength"})

LazyRule = Callable[[str], str]
"""Makes a rule that ends where its body first matches, and returns its name."""


def parameters(
    schema: Any, style: str, up_to: Callable[[str], str], lazy_rule: LazyRule, white: JsonWhitespace
) -> str:
    """The parameters of a tool as an expression, empty if it has none. Raises NotExpressibleError.

    up_to: writes free text up to a mark, included.
    """
    if not isinstance(schema, Mapping) or not schema.keys() <= _OBJECT | _ANNOTATIONS:
        raise unknown(f"such a schema in the style {style}")
    if schema.get("additionalProperties") or not schema.get("properties"):
        raise unknown(f"parameters without a name in the style {style}")
    if '"$ref"' in json.dumps(schema):
        raise unknown(f"references in the style {style}")
    opening, closing = MARKS[style]
    required = schema.get("required") or ()
    written = []
    for name, inner in schema["properties"].items():
        value = _value(inner, closing, up_to, lazy_rule, white)
        one = f"/{white.space}{escaped(opening.format(name))}/ {value}"
        written.append(one if name in required else f"({one})?")
    return " ".join(written)


def _value(
    schema: Any,
    closing: str,
    up_to: Callable[[str], str],
    lazy_rule: LazyRule,
    white: JsonWhitespace,
) -> str:
    """A value and the mark after it."""
    space = white.space
    known = dict(schema) if isinstance(schema, Mapping) else {}
    rest = {key: value for key, value in known.items() if key not in _ANNOTATIONS}
    if "enum" in rest or "const" in rest:
        return _one_of(rest["enum"] if "enum" in rest else [rest["const"]], closing, space)
    types = rest.get("type", "string")
    if "string" not in types:
        return f"/{space}/? %json {json.dumps(white.of(closed(rest)))} /{space}{escaped(closing)}/"
    if rest.keys() <= {"type"}:
        return up_to(closing)
    if types == "string" and rest.keys() <= _TEXT:
        most = rest.get("maxLength", "")
        return lazy_rule(
            f"/{space}(?s:.{{{int(rest.get('minLength', 0))},{most}}}){space}{escaped(closing)}/"
        )
    raise unknown("text with such bounds between XML marks")


def _one_of(values: list[Any], closing: str, space: str) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if not texts or any(text != text.strip() or not text for text in texts):
        raise unknown("such an enumeration between XML marks")
    return f"/{space}/? ({' | '.join(map(json.dumps, texts))}) /{space}{escaped(closing)}/"
