"""Unknown keys in configurations: an error that names the nearest known one. Standard library
only."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from cfg_core.errors import ConfigError

_MAX_LISTED = 20


def check_keys(given: Collection[str], known: Collection[str], where: str) -> None:
    """Raise ConfigError on the first key of `given` that is not in `known`, naming the nearest
    one."""
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key `{key}` in `{where}`: {nearest(key, known)}")


def nearest(name: object, known: Collection[str]) -> str:
    """The hint for an unknown name: the known one nearest to it, or all of them."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return (
        f"did you mean `{near[0]}`?"
        if near
        else f"known keys: {', '.join(sorted(known)[:_MAX_LISTED])}."
    )
