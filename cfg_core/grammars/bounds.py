"""Bounds on the size of a request's grammar, for each kind of grammar.

Standard library only, so that the ingress can check them too.

A grammar is whatever constrains the text of an answer: a choice, a JSON schema, a regular
expression, a context-free grammar, a structural tag, or the parameters of a tool. vLLM compiles it,
which takes more time than reading it. Each check here takes time proportional to the size of what
it reads, and none is recursive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cfg_core.errors import RequestError

STRUCTURED_OUTPUTS = "structured_outputs"
RESPONSE_FORMAT = "response_format"
FORMATS = (RESPONSE_FORMAT, "text", "output_config")
"""Fields with the format of an answer: in chats, in responses and in messages."""
TOOLS = "tools"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `structured_outputs`, of which a request sets one."""

WRAPPING = 8
"""Levels of nesting around a schema in a `response_format`, a tool, or a structural tag."""

_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


class _Sizes(NamedTuple):
    """Sizes of parsed JSON.

    nodes: number of objects, lists and other values.
    depth: levels of objects and lists alone, as vLLM counts them.
    chars: characters of all keys and strings.
    properties: entries of all objects whose key is `properties`.
    entries: length of the longest list.
    """

    nodes: int
    depth: int
    chars: int
    properties: int
    entries: int


@dataclass(frozen=True, kw_only=True)
class GrammarBounds:
    """Upper bounds on the grammars of one request.

    All bounds are at least 1. Characters are Unicode characters.
    """

    choices: int = 4_000
    choice_chars: int = 200_000
    enum_entries: int = 4_000
    schema_chars: int = 400_000
    schema_nodes: int = 20_000
    schema_depth: int = 64
    properties: int = 2_000
    regex_chars: int = 20_000
    grammar_chars: int = 200_000
    grammar_rules: int = 4_000
    bracket_depth: int = 200
    whitespace_chars: int = 200
    tools: int = 256

    def check_body(self, body: Mapping[str, Any]) -> None:
        """Check the fields of a body that become grammars, in OpenAI's or Anthropic's format.

        Raises RequestError, which names the field and the bound. Values of a wrong type are ignored
        here, because the code that parses the body refuses them.
        """
        outputs = body.get(STRUCTURED_OUTPUTS)
        if isinstance(outputs, Mapping):
            self.check_outputs(outputs)
        for name in FORMATS:
            if isinstance(body.get(name), Mapping):
                self._json(name, body[name])
        tools = body.get(TOOLS)
        if isinstance(tools, list):
            _at_most(TOOLS, len(tools), "tools", self.tools)
            self._json(TOOLS, tools)

    def check_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Check the fields of `structured_outputs`.

        outputs: the object in a body, or vLLM's StructuredOutputsParams as a mapping.
        """
        where = STRUCTURED_OUTPUTS
        self._choice(f"{where}.choice", outputs.get("choice"))
        self._text(f"{where}.regex", outputs.get("regex"), self.regex_chars)
        self._text(
            f"{where}.whitespace_pattern", outputs.get("whitespace_pattern"), self.whitespace_chars
        )
        self._grammar(f"{where}.grammar", outputs.get("grammar"))
        self._json(f"{where}.json", outputs.get("json"))
        # vLLM writes each tool twice for some models, which differ in white space.
        twice = replace(
            self,
            schema_chars=2 * self.schema_chars,
            schema_nodes=2 * self.schema_nodes,
            properties=2 * self.properties,
        )
        twice._json(f"{where}.structural_tag", outputs.get("structural_tag"))

    def _choice(self, field: str, choice: object) -> None:
        if not isinstance(choice, list):
            return
        _at_most(field, len(choice), "entries", self.choices)
        _at_most(
            field,
            sum(len(c) for c in choice if isinstance(c, str)),
            "characters",
            self.choice_chars,
        )

    def _text(self, field: str, text: object, most: int) -> None:
        if isinstance(text, str):
            _at_most(field, len(text), "characters", most)
            _at_most(field, bracket_depth(text), "levels of brackets", self.bracket_depth)

    def _grammar(self, field: str, grammar: object) -> None:
        self._text(field, grammar, self.grammar_chars)
        if isinstance(grammar, str):
            _at_most(
                field, max(grammar.count("::="), grammar.count("\n")), "rules", self.grammar_rules
            )

    def _json(self, field: str, value: object) -> None:
        """Check a schema, or a list or object that contains schemas, as text or parsed."""
        if isinstance(value, str):
            _at_most(field, len(value), "characters", self.schema_chars)
            _at_most(
                field, bracket_depth(value, quoted=True), "levels", self.schema_depth + WRAPPING
            )
            value = _parsed(value)
        if isinstance(value, dict | list):
            self._check(field, _measured(value, self))

    def _check(self, field: str, found: _Sizes) -> None:
        _at_most(field, found.depth, "levels", self.schema_depth + WRAPPING)
        _at_most(field, found.entries, "entries in one `enum` or list", self.enum_entries)
        _at_most(field, found.properties, "properties", self.properties)
        _at_most(field, found.nodes, "values", self.schema_nodes)
        _at_most(field, found.chars, "characters", self.schema_chars)


def bracket_depth(text: str, quoted: bool = False) -> int:
    """Return how deeply brackets of any kind are nested.

    A bracket after a backslash is not counted.
    quoted: whether to skip brackets inside double quotes, too.
    """
    depth = deepest = 0
    hidden = inside = False
    for char in text:
        if hidden:
            hidden = False
        elif char == "\\":
            hidden = True
        elif quoted and char == '"':
            inside = not inside
        elif not inside and char in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif not inside and char in _CLOSING:
            depth = max(0, depth - 1)
    return deepest


def _parsed(text: str) -> object:
    """Return the parsed JSON of `text`, or None if it is not JSON, which vLLM reports later."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _measured(value: dict[str, Any] | list[Any], bounds: GrammarBounds) -> _Sizes:
    """Return the sizes of parsed JSON.

    It stops once the nodes, depth, entries or properties exceed their bound. It then returns what
    it has counted so far.
    """
    nodes = depth = chars = properties = entries = 0
    for at, inner, key in _walk(value):
        nodes, chars = nodes + 1, chars + len(key) + (len(inner) if isinstance(inner, str) else 0)
        if isinstance(inner, dict | list):
            depth = max(depth, at)
        if isinstance(inner, dict) and key == "properties":
            properties += len(inner)
        if isinstance(inner, list):
            entries = max(entries, len(inner))
        if (
            nodes > bounds.schema_nodes
            or depth > bounds.schema_depth + WRAPPING
            or entries > bounds.enum_entries
            or properties > bounds.properties
        ):
            break
    return _Sizes(nodes, depth, chars, properties, entries)


def _walk(value: object) -> Iterator[tuple[int, object, str]]:
    """Yield every value inside parsed JSON, with its level (1 at the top) and its key.

    Lists and objects come before their entries. The entries of a list have an empty key.
    """
    rest: list[tuple[int, object, str]] = [(1, value, "")]
    while rest:
        at, inner, key = rest.pop()
        yield at, inner, key
        if isinstance(inner, dict):
            rest.extend((at + 1, item, str(name)) for name, item in inner.items())
        elif isinstance(inner, list):
            rest.extend((at + 1, item, "") for item in inner)


def _at_most(field: str, found: int, what: str, bound: int) -> None:
    if found > bound:
        raise RequestError(
            f"{field} has {found if what == 'entries' else f'more than {bound}'} {what}: this"
            f" server compiles at most {bound}. Make it smaller, or leave it out and validate the"
            " answer in your client.",
            field.partition(".")[0],
        )
