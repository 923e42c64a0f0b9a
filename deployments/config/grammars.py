"""The `grammars:` of `args:`: how large a grammar may be, and what it may cost to compile it.

A grammar is what constrains an answer's text: `structured_outputs`, `response_format`, the
parameters of tools.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import Field

from cfg_core.grammars.bounds import GrammarBounds
from cfg_core.grammars.limits import GrammarLimits
from deployments.config.base import YamlArgs

_B, _L = GrammarBounds(), GrammarLimits()


class GrammarArgs(YamlArgs):
    """Beyond the bounds a request is refused with 400 before an engine sees it. Below them each
    grammar is compiled in a process of its own first, which is killed when it costs too much: 400,
    too."""

    section = "grammars"

    choices: int = Field(default=_B.choices, ge=1, description="Entries of a `choice`.")
    choice_chars: int = Field(
        default=_B.choice_chars, ge=1, description="Characters of all entries of a `choice`."
    )
    enum_entries: int = Field(
        default=_B.enum_entries, ge=1, description="Entries of one `enum` or list in a schema."
    )
    schema_chars: int = Field(
        default=_B.schema_chars, ge=1, description="Characters of a schema, or of all tools."
    )
    schema_nodes: int = Field(
        default=_B.schema_nodes, ge=1, description="Values in a schema, or in all tools."
    )
    schema_depth: int = Field(
        default=_B.schema_depth, ge=1, description="Objects and lists inside each other."
    )
    properties: int = Field(
        default=_B.properties, ge=1, description="Properties in a schema, or in all tools."
    )
    regex_chars: int = Field(default=_B.regex_chars, ge=1, description="Characters of a `regex`.")
    grammar_chars: int = Field(
        default=_B.grammar_chars, ge=1, description="Characters of a `grammar`."
    )
    grammar_rules: int = Field(
        default=_B.grammar_rules, ge=1, description="Rules, or lines, of a `grammar`."
    )
    bracket_depth: int = Field(
        default=_B.bracket_depth, ge=1, description="Brackets inside each other in both."
    )
    whitespace_chars: int = Field(
        default=_B.whitespace_chars, ge=1, description="Of a `whitespace_pattern`."
    )
    tools: int = Field(default=_B.tools, ge=1, description="Tools of one request.")
    cpu_s: float = Field(
        default=_L.cpu_s, gt=0, description="Seconds of computation for one grammar; beyond, 400."
    )
    wall_s: float = Field(
        default=_L.wall_s, gt=0, description="Seconds in all for one grammar; beyond, 400."
    )
    memory_mb: int = Field(
        default=_L.memory_mb, ge=64, description="MiB for one grammar; beyond, 400."
    )
    mask_ms: float = Field(
        default=_L.mask_ms,
        gt=0,
        description=(
            "Milliseconds of computation to find the tokens that may come next, for which all"
            " requests wait. A grammar that takes longer is refused; one that turns out so later,"
            " at twice that, ends its request."
        ),
    )
    places: int = Field(
        default=_L.places,
        ge=1,
        description="Grammars that a replica compiles at once; one tenant has all but one.",
    )
    max_waiting: int = Field(
        default=_L.max_waiting,
        ge=1,
        description="Grammars of one tenant that wait for that; beyond, 429.",
    )
    remembered: int = Field(
        default=_L.remembered, ge=1, description="Grammars whose outcome a replica remembers."
    )
    start_s: float = Field(
        default=_L.start_s,
        gt=0,
        description="Seconds for the compiling process to start; then 429.",
    )
    at_start: bool = Field(
        default=_L.at_start,
        description=(
            "Start the compiling process with the engine and keep it, which takes 270 MB. Else the"
            " first grammar starts it, and waits some 10 s."
        ),
    )
    idle_s: float = Field(
        default=_L.idle_s,
        gt=0,
        description=(
            "Seconds without a new grammar after which the compiling process ends, if `at_start` is"
            " false."
        ),
    )

    @property
    def bounds(self) -> GrammarBounds:
        """The part that the ingress checks."""
        return GrammarBounds(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(GrammarBounds)}
        )

    @property
    def fields(self) -> dict[str, Any]:
        """Whatever is not at its default: the `grammars` of `guided_engine_args`."""
        return self.model_dump(exclude_defaults=True)
