"""Quick starts of the processes that tests start: the folder quick_start on their PYTHONPATH."""

from __future__ import annotations

import os
from pathlib import Path

QUICK_START = str(Path(__file__).parent / "quick_start")


def quick_starts() -> None:
    """Put the folder behind what this process gives its children."""
    places = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if QUICK_START not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join([*places, QUICK_START])


def python_path(*places: Path | str) -> str:
    """A PYTHONPATH of these places."""
    return os.pathsep.join([*map(str, places), QUICK_START])
