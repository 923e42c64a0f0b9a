"""Check the `args:` of a Serve config file in milliseconds, before `serve run` does.

python -m deployments.config FILE
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cfg_core.errors import ConfigError
from deployments.config.args import AppArgs


def complaints(path: Path) -> list[str]:
    """The mistakes in the `args:` of a Serve config file, one sentence each."""
    found = []
    for application in yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]:
        try:
            AppArgs.model_validate(application.get("args") or {}).resolved()
        except ValidationError as error:
            found += [_sentence(item) for item in error.errors()]
        except ConfigError as error:
            found.append(str(error))
    return found


def _sentence(item: Mapping[str, Any]) -> str:
    where = ".".join(map(str, item["loc"]))
    message = item["msg"].removeprefix("Value error, ")
    return message if item["type"] == "value_error" else f"`{where}` in `args`: {message}."


if __name__ == "__main__":
    if errors := complaints(Path(sys.argv[1])):
        sys.exit("\n".join(f"{sys.argv[1]}: {error}" for error in errors))
