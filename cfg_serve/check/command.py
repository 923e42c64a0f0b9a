"""`cfg-serve check`: what is wrong with files, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cfg_serve.check import file, yaml_text
from cfg_serve.check.lines import Problem
from cfg_serve.errors import CommandError
from cfg_serve.machine import version_of


def report(files: Sequence[Path], *, with_ray: bool) -> int:
    """Tell what is wrong with each file; returns 1 if anything is."""
    status = 0
    for path in files:
        found = problems(path, with_ray=with_ray)
        for line in found:
            print(line, file=sys.stderr)
        if found:
            status = 1
        else:
            print(f"{path}: all right")
    return status


def problems(path: Path, *, with_ray: bool) -> list[str]:
    """One sentence for each mistake, behind `FILE:LINE:`.

    Ray is asked if the rest is right, and Ray is here.
    """
    try:
        config, lines = yaml_text.read_with_lines(path)
    except CommandError as error:
        return [str(error)]
    found = list(file.problems_of(config))
    if not found and with_ray and version_of("ray"):
        found = _of_ray(config)
    return lines.told(path, found)


def _of_ray(config: dict[str, Any]) -> list[Problem]:
    from cfg_serve.check.ray_values import problems_of

    return problems_of(config)
