"""Rules: the scale of each token, from the rows of its two streams.

`KINDS` of a rule say which parameters it takes, and where the function is that computes it
(cfg_core/blend/rules.py has ours). An installed package adds one under the entry-point group
`cfg_serve.guidance_rules`, whose value is a `RuleKind`:

    [project.entry-points."cfg_serve.guidance_rules"]
    halfway = "my_package.kinds:HALFWAY"

This module does not import the functions, so requests are checked without torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from cfg_core.errors import ConfigError, GuidanceError
from cfg_core.keys import nearest
from cfg_core.params.checks import check_number, from_json
from cfg_core.params.field_table import Kind

ENTRY_POINTS = "cfg_serve.guidance_rules"
_EXAMPLE = '{"name": "adacad", "offset": 0}'
_MAX_NAME = 100


class Parameter(NamedTuple):
    """A number that a rule takes.

    default: None if it must be given.
    """

    default: float | None = None
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, kw_only=True)
class RuleKind:
    """A rule as a package declares it.

    compute: where its function is, as package.module:function. `cfg_core.blend.rules.Compute` says
        what it gets and returns. It is a function of the rows alone.
    reads_scale: whether it reads guidance_scale or guidance_schedule.
    """

    compute: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    reads_scale: bool = False


_SHARE = Parameter(least=0.0, most=1.0)

SHIPPED = {
    "adacad": RuleKind(
        compute="cfg_core.blend.rules:adacad", parameters={"offset": Parameter(0.0)}
    ),
    "arr": RuleKind(compute="cfg_core.blend.rules:arr"),
    "nwcad": RuleKind(
        compute="cfg_core.blend.rules:nwcad",
        parameters={
            "max_divergence": Parameter(least=0.0),
            "negative_margin": _SHARE,
            "conditional_margin": _SHARE,
        },
        reads_scale=True,
    ),
}


@functools.cache
def kinds() -> Mapping[str, RuleKind]:
    """Our rules and those of installed packages, by name; of equal names, a package's is used.

    Raises ConfigError if a package's cannot be loaded.
    """
    found = dict(SHIPPED)
    for point in entry_points(group=ENTRY_POINTS):
        try:
            kind = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"guidance rule `{point.name}`: `{point.value}` cannot be loaded: {error}."
            ) from error
        if not isinstance(kind, RuleKind):
            raise ConfigError(f"guidance rule `{point.name}`: `{point.value}` is no RuleKind.")
        found[point.name] = kind
    return found


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of a request, with all its parameters."""

    name: str
    arguments: tuple[tuple[str, float], ...] = ()

    @property
    def kind(self) -> RuleKind:
        return kinds()[self.name]

    def to_entry(self) -> dict[str, Any]:
        """As requests send it."""
        return {"name": self.name, **dict(self.arguments)}

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> Rule:
        """The inverse of `to_entry`. It checks nothing."""
        return cls(entry["name"], tuple((key, entry[key]) for key in entry if key != "name"))


def check_rule(value: object, param: str) -> Rule:
    """Return `value` as a rule of a known name, with known parameters."""
    if isinstance(value, Rule):
        return value
    value = from_json(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise GuidanceError(f"{param} must be an object such as {_EXAMPLE}.", param)
    name = value["name"]
    kind = kinds().get(name)
    if kind is None:
        shown = name[:_MAX_NAME]
        hint = nearest(shown, kinds(), "rules")
        raise GuidanceError(f"{param}: there is no rule {shown!r}: {hint}", param)
    for key in value:
        if key != "name" and key not in kind.parameters:
            known = ", ".join(kind.parameters) or "none"
            raise GuidanceError(
                f"{param}: {name} has no parameter {str(key)[:_MAX_NAME]!r}. Known: {known}.", param
            )
    arguments = ((key, _argument(value, key, one, param)) for key, one in kind.parameters.items())
    return Rule(name, tuple(arguments))


def _argument(value: Mapping[Any, Any], key: str, one: Parameter, param: str) -> float:
    given = value.get(key, one.default)
    if given is None:
        raise GuidanceError(f"{param}: {value['name']} needs {key}.", f"{param}.{key}")
    number = check_number(given, f"{param}.{key}")
    if not one.least <= number <= one.most:
        raise GuidanceError(
            f"{param}.{key} is {number:g}: it is from {one.least:g} to {one.most:g}.",
            f"{param}.{key}",
        )
    return number


A_RULE = Kind(
    check_rule,
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
