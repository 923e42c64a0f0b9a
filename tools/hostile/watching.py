"""The process of the watchers, as the stage commands it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

from tools.hostile.attempt import WATCHER
from tools.hostile.server import bearer
from tools.hostile.watchers import Seen
from tools.serving.process import REPOSITORY

ANSWER_LIMIT_S = 200.0
"""Time limit of a command to the watchers. They first wait for their open requests."""


class Watching:
    """The process of the watchers."""

    def __init__(self, url: str, keyed: bool, sees: bool) -> None:
        headers = {"X-Forwarded-For": WATCHER, **(bearer("watcher") if keyed else {})}
        command = [
            sys.executable,
            "-m",
            "tools.hostile.watchers",
            url,
            json.dumps(headers),
            *(["sees"] if sees else []),
        ]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    def tell(self, command: str) -> Any:
        """Send a command, and return the answer.

        Raises AssertionError if the watchers report an error or have ended.
        """
        limit = threading.Timer(ANSWER_LIMIT_S, self._process.kill)
        limit.start()
        try:
            self._commands.write(command + "\n")
            self._commands.flush()
            told = json.loads(self._answers.readline() or '{"error": "the watchers ended"}')
        finally:
            limit.cancel()
        assert not (isinstance(told, dict) and "error" in told), f"{command}: {told}"
        return told

    def collect(self) -> list[Seen]:
        return [Seen(**seen) for seen in self.tell("collect")]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()
