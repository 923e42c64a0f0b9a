"""The section `grammars:` of `args:`: how large a grammar may be, and what compiling it may cost.

A grammar is whatever constrains the text of an answer: `structured_outputs`, `response_format`, or
the parameters of tools.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from pydantic import Field

from cfg_core.grammars.bounds import GrammarBounds
from cfg_core.grammars.limits import GrammarLimits
from deployments.config.base import YamlArgs

_B, _L = GrammarBounds(), GrammarLimits()


class GrammarArgs(YamlArgs):
    """Bounds on the size of grammars, and limits on the cost of compiling one.

    A request with a grammar above the bounds is refused with 400, before an engine sees it. Every
    other grammar is first compiled in a separate process. If that costs too much, the process is
    killed, and the request is refused with 400, too.
    """

    section = "grammars"

    choices: int = Field(
        default=_B.choices, ge=1, description="Maximum number of entries of a `choice`."
    )
    choice_chars: int = Field(
        default=_B.choice_chars,
        ge=1,
        description="Maximum number of characters of all entries of a `choice` together.",
    )
    enum_entries: int = Field(
        default=_B.enum_entries,
        ge=1,
        description="Maximum number of entries of one `enum`, or of any other list in a schema.",
    )
    schema_chars: int = Field(
        default=_B.schema_chars,
        ge=1,
        description="Maximum number of characters of a schema, or of all tools together.",
    )
    schema_nodes: int = Field(
        default=_B.schema_nodes,
        ge=1,
        description=(
            "Maximum number of JSON values (objects, lists, texts, numbers) in a schema, or in all"
            " tools together."
        ),
    )
    schema_depth: int = Field(
        default=_B.schema_depth,
        ge=1,
        description=(
            "Maximum nesting depth of objects and lists in a schema. Eight more levels are allowed,"
            " because requests may wrap the schema."
        ),
    )
    properties: int = Field(
        default=_B.properties,
        ge=1,
        description="Maximum number of properties in a schema, or in all tools together.",
    )
    regex_chars: int = Field(
        default=_B.regex_chars, ge=1, description="Maximum number of characters of a `regex`."
    )
    grammar_chars: int = Field(
        default=_B.grammar_chars, ge=1, description="Maximum number of characters of a `grammar`."
    )
    grammar_rules: int = Field(
        default=_B.grammar_rules,
        ge=1,
        description="Maximum number of rules of a `grammar`, and also of its lines.",
    )
    bracket_depth: int = Field(
        default=_B.bracket_depth,
        ge=1,
        description=(
            "Maximum nesting depth of brackets in a `regex`, a `grammar` or a `whitespace_pattern`."
        ),
    )
    whitespace_chars: int = Field(
        default=_B.whitespace_chars,
        ge=1,
        description="Maximum number of characters of a `whitespace_pattern`.",
    )
    tools: int = Field(
        default=_B.tools, ge=1, description="Maximum number of tools of one request."
    )
    cpu_s: float = Field(
        default=_L.cpu_s,
        gt=0,
        description=(
            "CPU seconds that validating and compiling one grammar may take. A request whose"
            " grammar takes longer gets 400."
        ),
    )
    wall_s: float = Field(
        default=_L.wall_s,
        gt=0,
        description=(
            "Seconds of wall-clock time that validating and compiling one grammar may take. A"
            " request whose grammar takes longer, because the machine is busy, gets 429."
        ),
    )
    memory_mb: int = Field(
        default=_L.memory_mb,
        ge=64,
        description=(
            "MiB of memory that validating and compiling one grammar may take. A request whose"
            " grammar takes more gets 400."
        ),
    )
    mask_ms: float = Field(
        default=_L.mask_ms,
        gt=0,
        description=(
            "CPU milliseconds that a grammar may need in one step to find the tokens that it allows"
            " next. All requests of the engine wait for this. A grammar that needs more in its"
            " trial is refused with 400. If it later needs more than twice as much, its request"
            " ends with an error."
        ),
    )
    places: int = Field(
        default=_L.places,
        ge=1,
        description=(
            "Maximum number of grammars that a replica compiles at the same time. One tenant may"
            " use all of these places but one."
        ),
    )
    max_waiting: int = Field(
        default=_L.max_waiting,
        ge=1,
        description=(
            "Maximum number of grammars of one tenant that wait to be compiled. A request with one"
            " more gets 429."
        ),
    )
    remembered: int = Field(
        default=_L.remembered,
        ge=1,
        description=(
            "Number of grammars for which a replica remembers whether they were refused, so that it"
            " does not try them again."
        ),
    )
    start_s: float = Field(
        default=_L.start_s,
        gt=0,
        description=(
            "Seconds that the compiling process may take to start. If it is not ready then,"
            " requests with a grammar get 429."
        ),
    )
    at_start: bool = Field(
        default=_L.at_start,
        description=(
            "Start the compiling process together with the engine, and keep it running. It takes"
            " 270 MB of memory. If false, the first request with a grammar starts it, and waits"
            " about 10 s."
        ),
    )
    idle_s: float = Field(
        default=_L.idle_s,
        gt=0,
        description=(
            "Seconds without a new grammar after which the compiling process ends. Used only if"
            " `at_start` is false."
        ),
    )
    json_whitespace: int | None = Field(
        default=_L.json_whitespace,
        ge=1,
        description=(
            "Maximum number of characters of white space in a row that a grammar allows in JSON,"
            " outside of texts. Small models write newlines until the limit of tokens where a"
            " grammar lets them. `null` allows any number, as `vllm serve` does."
        ),
    )

    @cached_property
    def bounds(self) -> GrammarBounds:
        """The bounds on the size of grammars, which the ingress checks."""
        return GrammarBounds(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(GrammarBounds)}
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults: the `grammars` of `guided_engine_args`."""
        return self.model_dump(exclude_defaults=True)
