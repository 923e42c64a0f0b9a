"""Errors for unknown keys in configurations, with the nearest known key as a hint.

Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from cfg_core.errors import ConfigError

_MAX_LISTED = 20


def check_keys(given: Collection[str], known: Collection[str], where: str) -> None:
    """Raise ConfigError for the first key of `given` that is not in `known`.

    The message names the nearest known key.
    where: the part of the configuration that has the keys, for the message.
    """
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key `{key}` in `{where}`: {nearest(key, known)}")


def nearest(name: object, known: Collection[str], kind: str = "keys") -> str:
    """Return the hint for an unknown name: the nearest known one, or else a list of known ones.

    kind: what the names are, in the plural.
    """
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return (
        f"did you mean `{near[0]}`?"
        if near
        else f"known {kind}: {', '.join(sorted(known)[:_MAX_LISTED])}."
    )
