"""The engine does not run ahead of its frontend.

vLLM's engine process sends outputs as fast as it makes them; the frontend puts them into words in
one event loop. Where that loop is the slower one (20 logprobs for each of 64 streams), outputs pile
up in between without a bound, and a new request's first token waits behind all of them. So the
frontend tells how far it is, and the scheduler schedules nothing while the oldest outputs that the
frontend has not processed are older than BEHIND_S.

It is told through eight bytes of a file that both processes map: the timestamp of the newest
outputs processed, by time.monotonic, which is the same clock for all processes of a machine.
Without a file, nothing is held back.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cfg_core.vllm_plugin.config import ours

if TYPE_CHECKING:
    from vllm.config import VllmConfig


FILE = "pace_file"
"""Its path, in our corner of `additional_config`."""

BEHIND_S = 0.25
WAIT_S = 0.01
"""How long a held step waits at most; the engine process reads its input between steps."""

_STAMP = struct.Struct("d")


def new_file(path: Path) -> None:
    """Make the file. It may be deleted as soon as both sides have opened it."""
    path.write_bytes(_STAMP.pack(0.0))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _STAMP.size)


class Progress:
    """The frontend's side."""

    def __init__(self, path: Path) -> None:
        self._shared = _mapped(path)

    def processed(self, timestamp: float) -> None:
        """The outputs of this timestamp have been processed, and with them all that came before."""
        _STAMP.pack_into(self._shared, 0, timestamp)


class Pace:
    """The scheduler's side. path: None: nobody tells how far the frontend is."""

    def __init__(self, path: Path | None) -> None:
        self._shared = None if path is None else _mapped(path)
        self._sent: deque[float] = deque()  # timestamps of outputs that may not be processed yet
        self.held_s = 0.0
        """For how long steps were held, since the start."""

    @classmethod
    def of(cls, config: VllmConfig) -> Pace:
        path = ours(config).get(FILE)
        return cls(None if path is None else Path(path))

    def sent(self, outputs: Mapping[int, Any]) -> None:
        """These go to the frontend now: EngineCoreOutputs by client."""
        if self._shared is not None:
            self._sent.extend(
                per_client.timestamp for per_client in outputs.values() if per_client.outputs
            )

    def holds(self) -> bool:
        """Whether nothing should be scheduled now. Waits a moment before it says so."""
        if not self._is_behind():
            return False
        began = time.monotonic()
        time.sleep(WAIT_S)
        self.held_s += time.monotonic() - began
        return self._is_behind()

    def _is_behind(self) -> bool:
        if self._shared is None or not self._sent:
            return False
        (processed,) = _STAMP.unpack_from(self._shared, 0)
        while self._sent and self._sent[0] <= processed:
            self._sent.popleft()
        return bool(self._sent) and time.monotonic() - self._sent[0] > BEHIND_S
