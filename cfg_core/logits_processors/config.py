"""What a configuration may say about logits processors. Standard library only: a YAML is checked
without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfg_core.errors import ConfigError

FIELD = "logits_processors"
"""Of a configuration: factories by name. Of a request: which of them, with arguments."""


def check_config(config: object) -> dict[str, Any]:
    """The configuration of `logits_processors`, if it is well-formed; ConfigError otherwise.
    Imports nothing."""
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
