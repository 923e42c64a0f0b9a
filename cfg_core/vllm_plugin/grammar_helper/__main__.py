"""The grammar helper: a process that loads the compilers once and forks for each trial.

    python -m cfg_core.vllm_plugin.grammar_helper

frontend/helper_process.py starts it and exchanges frames with it (frames.py). The helper never
parses a grammar itself. Only a fork does, under limits on CPU time, memory and stack, and with a
deadline. When a fork dies, nothing else is lost. One fork always waits in advance, because forking
takes longer than compiling most grammars. The helper ends with its parent, and its forks end with
the helper.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

from cfg_core.memory import quick_start
from cfg_core.vllm_plugin.grammar_helper import frames
from cfg_core.vllm_plugin.grammar_helper.forks import Fork, die_with_parent
from cfg_core.vllm_plugin.grammar_helper.frames import HEADER, frame, read_exactly

_MAX_VERDICT = 16 << 20


class Helper:
    """The main loop: it reads frames, starts forks, and sends their verdicts."""

    def __init__(
        self, trial: Any, limits: dict[str, Any], requests: BinaryIO, replies: BinaryIO
    ) -> None:
        self._trial, self._limits, self._requests, self._replies = trial, limits, requests, replies
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, None)
        self._running: dict[int, Fork] = {}
        self._spare = Fork(trial, limits)

    def run(self) -> None:
        """Serve requests. Raises EOFError when the parent closes the pipe."""
        while True:
            for key, _ in self._selector.select(self._until_deadline()):
                if key.data is None:
                    self._take()
                else:
                    self._hear(key.data)
            self._end_late()

    def _until_deadline(self) -> float | None:
        first = min((fork.deadline for fork in self._running.values()), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _take(self) -> None:
        size, kind, trial_id = HEADER.unpack(read_exactly(self._requests, HEADER.size))
        payload = read_exactly(self._requests, size)
        if kind == frames.TRY:
            fork = self._running[trial_id] = self._living_spare()
            self._selector.register(fork.verdict, selectors.EVENT_READ, fork)
            fork.begin(trial_id, payload)
            self._spare = Fork(self._trial, self._limits)
        elif kind == frames.CANCEL and trial_id in self._running:
            self._end(self._running[trial_id])

    def _living_spare(self) -> Fork:
        """The fork that waits. If it has died, it is replaced first."""
        if self._spare.has_died():
            self._spare = Fork(self._trial, self._limits)
        return self._spare

    def _hear(self, fork: Fork) -> None:
        """Read more of a fork's verdict. At its end, send the verdict or why there is none."""
        if fork.id not in self._running:
            return
        part = os.read(fork.verdict, 1 << 16)
        fork.data += part
        if part and len(fork.data) <= _MAX_VERDICT:
            return
        code = self._end(fork) if part else self._forget(fork)
        if code == 0:
            self._reply(frames.VERDICT, fork.id, fork.data)
        else:
            self._reply(frames.KILLED, fork.id, _why(code))

    def _end_late(self) -> None:
        now = time.monotonic()
        for fork in [fork for fork in self._running.values() if fork.deadline <= now]:
            self._end(fork)
            self._reply(frames.KILLED, fork.id, frames.OUT_OF_TIME)

    def _end(self, fork: Fork) -> int:
        fork.kill()
        return self._forget(fork)

    def _forget(self, fork: Fork) -> int:
        del self._running[fork.id]
        self._selector.unregister(fork.verdict)
        return fork.reap()

    def _reply(self, kind: bytes, trial_id: int, payload: bytes = b"") -> None:
        self._replies.write(frame(kind, trial_id, payload))
        self._replies.flush()


def _why(code: int) -> bytes:
    """Why a fork ended with this code, before its deadline."""
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return frames.OUT_OF_CPU
    return frames.GONE if code in (-signal.SIGKILL, -signal.SIGTERM) else frames.DIED


def main() -> None:
    """Read the settings, load everything, say READY, and serve until stdin ends.

    The settings are a pickle of (process id of the parent, settings, limits), after its length.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and we end with it
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        (size,) = struct.unpack("!I", read_exactly(requests, 4))
        parent, settings, limits = pickle.loads(read_exactly(requests, size))
        die_with_parent(parent)
        try:
            helper = Helper(_prepared(settings), limits, requests, replies)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            replies.write(frame(frames.FAILED, payload=text))
            replies.flush()
            return
        helper._reply(frames.READY, 0)
        helper.run()
    except (EOFError, BrokenPipeError):
        pass  # the parent has ended or closed the pipe; the forks end with us


def _prepared(settings: dict[str, Any]) -> Any:
    with quick_start():
        from cfg_core.vllm_plugin.grammar_helper.trial import Trial, quiet

        quiet()
        trial = Trial(settings)
        trial.warm_up()
    gc.freeze()  # a collection in a fork would write to the pages that it shares
    return trial


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
