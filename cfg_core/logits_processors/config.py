"""Checks what a configuration says about logits processors.

Standard library only, so that a YAML file can be checked without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfg_core.errors import ConfigError

FIELD = "logits_processors"
"""Field of a configuration (factories by name) and of a request (names, with arguments)."""


def check_config(config: object) -> dict[str, Any]:
    """Return the configuration of `logits_processors` as a dict if it is well-formed.

    Raises ConfigError otherwise. It does not import the factories.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"`{FIELD}` must map names to factories, as in `shout:"
            " my_package.processors:ShoutFactory`."
        )
    for name, entry in config.items():
        path = entry.get("factory") if isinstance(entry, Mapping) else entry
        if not isinstance(path, str) or path.count(":") != 1:
            raise ConfigError(
                f"`{FIELD}`: `{name}` needs a factory, a dotted path package.module:Class."
            )
    return dict(config)
