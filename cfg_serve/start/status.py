"""What Serve says of its deployments, as cfg_serve.start.child writes it down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


@dataclass(frozen=True)
class Part:
    """A deployment. running: replicas that answer."""

    name: str
    status: str
    running: int
    message: str


@dataclass(frozen=True)
class Status:
    """refused: what Ray refuses in the configuration.

    is_running: whether every deployment of every application has all its replicas.
    failure: what Serve says of the application that failed; None if none did.
    """

    refused: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    is_running: bool = False
    failure: str | None = None

    def progress(self, wanted: dict[str, int]) -> str:
        """How many replicas of each deployment answer, of how many."""
        return ", ".join(
            f"{part.name} {part.running} of {wanted.get(part.name, 1)}" for part in self.parts
        )


def read(file: Path) -> Status:
    """What the file says; an empty Status before there is one."""
    try:
        said: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return Status()
    applications = list(said.get("applications", {}).values())
    failed = [told["message"] for told in applications if told["status"] in FAILED]
    return Status(
        refused=tuple(said.get("refused", ())),
        parts=tuple(
            Part(name, **part)
            for told in applications
            for name, part in told["deployments"].items()
        ),
        is_running=bool(applications) and all(told["status"] == "RUNNING" for told in applications),
        failure=failed[0] if failed else None,
    )
