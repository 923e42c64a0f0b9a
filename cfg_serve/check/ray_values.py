"""Check the values of Ray Serve's own options, by Ray's own classes.

Importing Ray takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, HTTPOptions
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import VALID_PLACEMENT_GROUP_STRATEGIES

from cfg_serve.check.lines import Place, Problem

SCALING, STRATEGY = "autoscaling_config", "placement_group_strategy"


def problems_of(config: Mapping[str, Any]) -> list[Problem]:
    """What Ray would refuse in a configuration whose keys are right."""
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return _sentences(error, config)
    return list(_unchecked(config))


def _unchecked(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What Serve reads only later, when its processes run."""
    if refused := _refused(HTTPOptions, config.get("http_options") or {}):
        yield Problem(f"`http_options`: {refused}.", at=("http_options",))
    for number, application in enumerate(config["applications"]):
        for at, entry in enumerate(application.get("deployments") or ()):
            yield from _of_deployment(entry, ("applications", number, "deployments", at))


def _of_deployment(entry: Mapping[str, Any], at: Place) -> Iterator[Problem]:
    name, scaling, strategy = entry["name"], entry.get(SCALING), entry.get(STRATEGY, "PACK")
    if scaling and (refused := _refused(AutoscalingConfig, scaling)):
        yield Problem(f"`{SCALING}` of `{name}`: {refused}.", at=(*at, SCALING))
    if strategy not in VALID_PLACEMENT_GROUP_STRATEGIES:
        known = ", ".join(sorted(VALID_PLACEMENT_GROUP_STRATEGIES))
        said = f"`{STRATEGY}` of `{name}` is {strategy!r}: use one of {known}."
        yield Problem(said, at=(*at, STRATEGY))


def _refused(cls: type[Any], values: Mapping[str, Any]) -> str | None:
    try:
        cls(**values)
    except ValidationError as error:
        item = error.errors()[0]
        return f"{'.'.join(map(str, item['loc']))}: {_said(item)}".removeprefix(": ")
    except (TypeError, ValueError) as error:
        return str(error).rstrip(".!")
    return None


def _sentences(error: ValidationError, config: Mapping[str, Any]) -> list[Problem]:
    """One sentence for each place. A union of types tells one error for each type."""
    told: dict[str, Problem] = {}
    for item in error.errors():
        where = _place(item["loc"], config)
        told.setdefault(where, Problem(f"{where}: {_said(item)}.", at=item["loc"]))
    return list(told.values())


def _said(item: Mapping[str, Any]) -> str:
    return str(item["msg"]).removeprefix("Value error, ").rstrip(".!")


def _place(loc: Sequence[int | str], config: Mapping[str, Any]) -> str:
    """Where a value stands, in the words of the file; names of types are left out."""
    at: Any = config
    words: list[str] = []
    for part in loc:
        if isinstance(at, Mapping) and part in at:
            words.append(str(part))
        elif isinstance(at, list) and isinstance(part, int) and part < len(at):
            name = at[part].get("name") if isinstance(at[part], Mapping) else None
            words = [f"{words[-1]}.{name}"] if name and words else [*words, str(part)]
        else:
            if isinstance(part, str) and isinstance(at, Mapping) and "[" not in part:
                words.append(part)  # a key that is missing
            break
        at = at[part]
    return f"`{'.'.join(words)}`" if words else "the file"
