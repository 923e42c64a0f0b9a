"""The ways to compile a grammar, in the order in which they are tried.

vLLM gives a schema to xgrammar if it does not know that xgrammar drops something of it. Here a
schema gets xgrammar only if nothing of it is lost there (cfg_core/grammars/keywords.py). Otherwise
llguidance gets it, with keywords that llguidance lacks written by others (rewriting.py). What
nobody enforces is dropped, and the way says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from cfg_core.grammars import rewriting
from cfg_core.grammars.keywords import UnenforcedKeyword, lost_by_xgrammar
from cfg_core.vllm_plugin.grammar_backends import GUIDANCE, XGRAMMAR
from cfg_core.vllm_plugin.grammar_helper.for_guidance import fields_for_guidance
from cfg_core.vllm_plugin.grammar_helper.lark_text import (
    JsonWhitespace,
    NotExpressibleError,
    parsed,
)

JSON, TAG, JSON_OBJECT = "json", "structural_tag", "json_object"
AUTO = "auto"
ANY_OBJECT = {"type": "object"}


class Way(NamedTuple):
    """One way to compile a grammar.

    fields: those of StructuredOutputsParams, for validation.
    backend: vLLM's name of the compiler, `auto` included.
    lost: the keywords that are not enforced.
    proofs: schemas that llguidance must be able to compile first.
    compiled: what to compile instead of `fields`.
    """

    fields: dict[str, Any]
    backend: str
    lost: tuple[UnenforcedKeyword, ...] = ()
    proofs: tuple[Any, ...] = ()
    compiled: dict[str, Any] | None = None


class CompileOptions(NamedTuple):
    """What a grammar is compiled for.

    backend: the `backend` of vLLM's structured_outputs_config.
    compiler: None for all, or the only one to use.
    whitespace: most characters of white space in a row in JSON, None for any number.
    of_tools: whether vLLM made the grammar of tools. Then what cannot be read in their schemas is
        not enforced, because the client asked for a chat and not for a grammar.
    """

    backend: str
    compiler: str | None
    whitespace: int | None
    of_tools: bool


def ways(
    fields: Mapping[str, Any], options: CompileOptions, added: Mapping[str, int]
) -> Iterator[Way]:
    """The ways to compile a grammar. Raises ValueError and the like for what is no grammar.

    added: tokens that were added to the vocabulary (for_guidance.added_tokens).
    """
    given, spaces = with_schemas(fields, rewriting.without_formats), options.whitespace
    unread = list[UnenforcedKeyword]()
    if options.of_tools:
        unread = _each(schemas_of(given), lambda schema: rewriting.readable(schema)[1])
        given = with_schemas(given, lambda schema: rewriting.readable(schema)[0])
    schemas = schemas_of(given)
    lost = unread + _each(schemas, lost_by_xgrammar)
    if options.backend == XGRAMMAR:
        yield _by_xgrammar(given, spaces, XGRAMMAR, lost)
    elif options.backend != AUTO:
        yield Way(_spaced(given, spaces, options.backend), options.backend, tuple(unread))
    else:
        yield from _chosen(given, schemas, options, added, unread, lost)
    if options.of_tools and options.compiler is None:
        free = with_schemas(given, lambda _: ANY_OBJECT, every_style=True)
        backend = XGRAMMAR if options.backend == AUTO else options.backend
        yield _by_xgrammar(free, spaces, backend, [UnenforcedKeyword("", "parameters")])


def _chosen(
    given: Mapping[str, Any],
    schemas: list[Any],
    options: CompileOptions,
    added: Mapping[str, int],
    unread: list[UnenforcedKeyword],
    lost: list[UnenforcedKeyword],
) -> Iterator[Way]:
    """The ways under `auto`. lost: what xgrammar does not enforce, `unread` included."""
    by_xgrammar = partial(_by_xgrammar, given, options.whitespace)
    whole, tag = len(lost) == len(unread), given.get(TAG) is not None
    if options.compiler == XGRAMMAR or (whole and options.compiler is None):
        yield by_xgrammar(XGRAMMAR if schemas or tag else AUTO, lost)
    if options.compiler != XGRAMMAR:
        try:
            for way in _by_guidance(given, schemas, options, added):
                yield way._replace(lost=(*unread, *way.lost))
        except NotExpressibleError:
            if options.compiler == GUIDANCE:
                raise
    if options.compiler is None and not whole:
        yield by_xgrammar(XGRAMMAR if tag else AUTO, lost)


def _each(
    schemas: list[Any], of_one: Callable[[Any], list[UnenforcedKeyword]]
) -> list[UnenforcedKeyword]:
    return [lost for schema in schemas for lost in of_one(schema)]


def _by_guidance(
    given: Mapping[str, Any], schemas: list[Any], options: CompileOptions, added: Mapping[str, int]
) -> Iterator[Way]:
    """The ways of llguidance: exact ones, and then one that drops what nobody enforces."""

    def way(change: Callable[[Any], Any], lost: list[UnenforcedKeyword], proven: bool) -> Way:
        made = [change(schema) for schema in schemas] if proven else []
        proofs = tuple(one for one in made if rewriting.one_ofs(one))
        united = with_schemas(given, lambda schema: rewriting.any_of(change(schema)))
        ours = fields_for_guidance(united, added, JsonWhitespace(options.whitespace))
        return Way(ours, GUIDANCE, tuple(lost), proofs)

    yield way(rewriting.rewritten, [], True)
    if not schemas:
        return
    exclusive = partial(rewriting.rewritten, one_of=True)
    if any(rewriting.one_ofs(schema) for schema in schemas):
        yield way(exclusive, [], True)

    def relax(schema: Any) -> tuple[Any, list[UnenforcedKeyword]]:
        return rewriting.relaxed(exclusive(schema))

    dropped = _each(schemas, lambda schema: relax(schema)[1])
    if dropped:
        yield way(lambda schema: relax(schema)[0], dropped, True)
    several = _each(schemas, lambda schema: rewriting.one_ofs(relax(schema)[0]))
    if several:
        yield way(lambda schema: relax(schema)[0], dropped + several, False)


def _by_xgrammar(
    given: Mapping[str, Any], whitespace: int | None, backend: str, lost: list[UnenforcedKeyword]
) -> Way:
    """xgrammar bounds white space only in structural tags, so a schema becomes one."""
    fields, said = dict(given), tuple(lost)
    if whitespace is None or backend not in (XGRAMMAR, AUTO):
        return Way(fields, backend, said)
    if fields.get(JSON) is not None or fields.get(JSON_OBJECT):
        schema = ANY_OBJECT if fields.get(JSON) is None else parsed(fields[JSON])
        format_ = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": whitespace}
        tag = json.dumps({"type": TAG, "format": format_})
        return Way(fields, backend, said, (), {**fields, JSON: None, JSON_OBJECT: None, TAG: tag})
    if fields.get(TAG) is not None:
        tag = parsed(fields[TAG])
        return Way({**fields, TAG: json.dumps(_bounded(tag, whitespace))}, backend, said)
    return Way(fields, backend, said)


def _bounded(tag: Any, whitespace: int) -> Any:
    """A structural tag whose schemas have a bound on white space."""
    if isinstance(tag, list):
        return [_bounded(item, whitespace) for item in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        most = tag.get("max_whitespace_cnt")
        return {**tag, "max_whitespace_cnt": whitespace if most is None else most}
    return {key: _bounded(value, whitespace) for key, value in tag.items()}


def _spaced(fields: Mapping[str, Any], whitespace: int | None, backend: str) -> dict[str, Any]:
    """The fields for a compiler that the configuration names, which is not xgrammar."""
    if fields.get(JSON) is None or backend != GUIDANCE:
        return dict(fields)
    return {**fields, JSON: json.dumps(JsonWhitespace(whitespace).of(parsed(fields[JSON])))}


def schemas_of(fields: Mapping[str, Any]) -> list[Any]:
    """The schemas of a grammar whose values are JSON."""
    found = list[Any]()

    def note(schema: Any) -> Any:
        found.append(schema)
        return schema

    with_schemas(fields, note)
    return found


def with_schemas(
    fields: Mapping[str, Any], change: Callable[[Any], Any], every_style: bool = False
) -> dict[str, Any]:
    """The fields with each of their schemas changed.

    every_style: whether to change those, too, whose values stand between XML marks.
    """
    if fields.get(JSON) is not None:
        return {**fields, JSON: json.dumps(change(parsed(fields[JSON])))}
    if fields.get(TAG) is not None:
        return {**fields, TAG: json.dumps(_changed(parsed(fields[TAG]), change, every_style))}
    return dict(fields)


def _changed(tag: Any, change: Callable[[Any], Any], every_style: bool) -> Any:
    if isinstance(tag, list):
        return [_changed(item, change, every_style) for item in tag]
    if not isinstance(tag, dict):
        return tag
    changes = every_style or tag.get("style", "json") == "json"
    return {
        key: (
            (change(parsed(value)) if changes else value)
            if key in ("json_schema", "schema")
            else _changed(value, change, every_style)
        )
        for key, value in tag.items()
    }
