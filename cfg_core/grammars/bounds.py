"""Bounds on the size of a request's grammar, for each kind of grammar.

Standard library only, so that the ingress can check them too.

A grammar is whatever constrains the text of an answer: a choice, a JSON schema, a regular
expression, a context-free grammar, a structural tag, or the parameters of a tool. vLLM compiles it,
which takes more time than reading it. Each check here takes time proportional to the size of what
it reads, and none is recursive.

The bounds are constants: they limit what it takes to read a grammar, which is the same everywhere.
What it takes to compile one depends on the model and the machine. A trial measures that, and its
limits are options (trials.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cfg_core.errors import RequestError

STRUCTURED_OUTPUTS = "structured_outputs"
RESPONSE_FORMAT = "response_format"
FORMATS = (RESPONSE_FORMAT, "text", "output_config")
"""Fields with the format of an answer: in chats, in responses and in messages."""
TOOLS = "tools"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `structured_outputs`, of which a request sets one."""

MAX_CHOICES, MAX_CHOICE_CHARS = 4_000, 200_000
"""Entries of a `choice`, and characters of all of them together."""

MAX_SCHEMA_CHARS, MAX_SCHEMA_NODES = 400_000, 20_000
"""Characters and JSON values of a schema, or of all tools together."""

MAX_SCHEMA_DEPTH = 64
"""Nesting of objects and lists in a schema. Code that rewrites schemas recurses (rewriting.py)."""

WRAPPING = 8
"""Levels of nesting around a schema in a `response_format`, a tool, or a structural tag."""

MAX_PROPERTIES = 2_000
"""Properties of a schema, or of all tools together.

So many take xgrammar a minute, with a vocabulary of 262,144 tokens.
"""

MAX_ENUM_ENTRIES = 4_000
"""Entries of one `enum`, or of any other list in a schema."""

MAX_REGEX_CHARS, MAX_WHITESPACE_CHARS = 20_000, 200
"""Characters of a `regex` and of a `whitespace_pattern`."""

MAX_GRAMMAR_CHARS, MAX_GRAMMAR_RULES = 200_000, 4_000
"""Characters of a `grammar`, and its rules or lines."""

MAX_BRACKET_DEPTH = 200
"""Nesting of brackets in a `regex`, a `grammar` or a `whitespace_pattern`."""

MAX_TOOLS = 256
"""Tools of one request."""

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


def check_body(body: Mapping[str, Any]) -> None:
    """Check the fields of a body that become grammars, in OpenAI's or Anthropic's format.

    Raises RequestError, which names the field and the bound. Values of a wrong type are ignored
    here, because the code that parses the body refuses them.
    """
    outputs = body.get(STRUCTURED_OUTPUTS)
    if isinstance(outputs, Mapping):
        check_outputs(outputs)
    for name in FORMATS:
        if isinstance(body.get(name), Mapping):
            _check_json(name, body[name])
    tools = body.get(TOOLS)
    if isinstance(tools, list):
        _at_most(TOOLS, len(tools), "tools", MAX_TOOLS)
        _check_json(TOOLS, tools)


def check_outputs(outputs: Mapping[str, Any]) -> None:
    """Check the fields of `structured_outputs`.

    outputs: the object in a body, or vLLM's StructuredOutputsParams as a mapping.
    """
    where = STRUCTURED_OUTPUTS
    _check_choice(f"{where}.choice", outputs.get("choice"))
    _check_text(f"{where}.regex", outputs.get("regex"), MAX_REGEX_CHARS)
    pattern = outputs.get("whitespace_pattern")
    _check_text(f"{where}.whitespace_pattern", pattern, MAX_WHITESPACE_CHARS)
    _check_grammar(f"{where}.grammar", outputs.get("grammar"))
    _check_json(f"{where}.json", outputs.get("json"))
    # vLLM writes each tool twice for some models, which differ in white space.
    _check_json(f"{where}.structural_tag", outputs.get("structural_tag"), copies=2)


def _check_choice(field: str, choice: object) -> None:
    if isinstance(choice, list):
        _at_most(field, len(choice), "entries", MAX_CHOICES)
        num_chars = sum(len(entry) for entry in choice if isinstance(entry, str))
        _at_most(field, num_chars, "characters", MAX_CHOICE_CHARS)


def _check_text(field: str, text: object, most: int) -> None:
    if isinstance(text, str):
        _at_most(field, len(text), "characters", most)
        _at_most(field, bracket_depth(text), "levels of brackets", MAX_BRACKET_DEPTH)


def _check_grammar(field: str, grammar: object) -> None:
    _check_text(field, grammar, MAX_GRAMMAR_CHARS)
    if isinstance(grammar, str):
        num_rules = max(grammar.count("::="), grammar.count("\n"))
        _at_most(field, num_rules, "rules", MAX_GRAMMAR_RULES)


def _check_json(field: str, value: object, copies: int = 1) -> None:
    """Check a schema, or a list or object that contains schemas, as text or parsed.

    copies: how often each schema may stand in it.
    """
    max_depth = MAX_SCHEMA_DEPTH + WRAPPING
    if isinstance(value, str):
        _at_most(field, len(value), "characters", copies * MAX_SCHEMA_CHARS)
        _at_most(field, bracket_depth(value, quoted=True), "levels", max_depth)
        value = _parsed(value)
    if isinstance(value, dict | list):
        found = _measured(value, copies)
        _at_most(field, found.depth, "levels", max_depth)
        _at_most(field, found.entries, "entries in one `enum` or list", MAX_ENUM_ENTRIES)
        _at_most(field, found.properties, "properties", copies * MAX_PROPERTIES)
        _at_most(field, found.nodes, "values", copies * MAX_SCHEMA_NODES)
        _at_most(field, found.chars, "characters", copies * MAX_SCHEMA_CHARS)


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


def _measured(value: dict[str, Any] | list[Any], copies: int) -> _Sizes:
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
            nodes > copies * MAX_SCHEMA_NODES
            or depth > MAX_SCHEMA_DEPTH + WRAPPING
            or entries > MAX_ENUM_ENTRIES
            or properties > copies * MAX_PROPERTIES
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
