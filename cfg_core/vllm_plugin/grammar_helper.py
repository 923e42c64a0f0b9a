"""The process that tries grammars: it loads the compilers once and forks for each trial.

    python -m cfg_core.vllm_plugin.grammar_helper      started by grammar_sandbox.py, which speaks over stdin and stdout

It never reads a grammar itself: only the fork does, under limits on CPU time, memory and stack, with a deadline. A fork
that dies takes nothing with it. One fork waits in advance, since forking takes longer than most grammars. The process
ends with its parent, and its forks end with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import selectors
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

HEADER = struct.Struct("!IcQ")
"""A frame: length of the payload, kind, id of the trial."""

TRY, CANCEL = b"T", b"C"
READY, VERDICT, KILLED, FAILED = b"Y", b"V", b"K", b"F"
OUT_OF_TIME, DIED = b"time", b"died"
"""What KILLED says."""

STACK_BYTES = 4 << 20
"""Less than the engine's threads have (8 MiB), so what recurses too deeply there dies here."""

_PR_SET_PDEATHSIG = 1
_MAX_VERDICT = 16 << 20


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    """`size` bytes of an unbuffered stream; EOFError if it ends before."""
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def die_with_parent(parent: int) -> None:
    """End this process when `parent` ends, however it does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class Fork:
    """A forked process: it reads one request, writes one verdict, and ends."""

    def __init__(self, trial: Any, limits: dict[str, Any]) -> None:
        """limits: `cpu_s`, `wall_s` and `memory_bytes` (beyond what the process has already)."""
        request_end, self._request = os.pipe()
        self.verdict, verdict_end = os.pipe()
        self.id, self.deadline, self.data, self._wall_s = 0, float("inf"), b"", limits["wall_s"]
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._request)
            _serve_one(trial, limits, request_end, verdict_end)
        os.close(request_end)
        os.close(verdict_end)

    def begin(self, trial_id: int, payload: bytes) -> None:
        """Give it its request."""
        self.id, self.deadline = trial_id, time.monotonic() + self._wall_s
        with suppress(BrokenPipeError), os.fdopen(self._request, "wb") as stream:
            stream.write(payload)  # if it died meanwhile, its end is told as that of any other

    def has_died(self) -> bool:
        """Whether it ended before it began; it is reaped then, and cannot begin any more."""
        died = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        if died:
            os.close(self._request)
            os.close(self.verdict)
        return died

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for its end, which must be near; returns its exit code, or minus the signal that ended it."""
        os.close(self.verdict)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _serve_one(trial: Any, limits: dict[str, Any], request_end: int, verdict_end: int) -> NoReturn:
    """The life of a fork."""
    code = 1
    try:
        die_with_parent(os.getppid())
        with os.fdopen(request_end, "rb") as stream:
            payload = stream.read()
        if payload:
            _limit(limits)
            verdict = json.dumps(trial.run(json.loads(payload))).encode()
            with os.fdopen(verdict_end, "wb") as stream:
                stream.write(verdict)
            code = 0
    finally:
        os._exit(code)


def _limit(limits: dict[str, Any]) -> None:
    used = time.process_time()
    seconds = int(used + limits["cpu_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])  # exact; ends the process, as does the limit
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limits["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    os.nice(5)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


class Helper:
    """The loop: frames in, forks, verdicts out."""

    def __init__(self, trial: Any, limits: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
        self._trial, self._limits, self._requests, self._replies = trial, limits, requests, replies
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, None)
        self._running: dict[int, Fork] = {}
        self._spare = Fork(trial, limits)

    def run(self) -> None:
        """Until the parent closes the pipe."""
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
        if kind == TRY:
            fork = self._running[trial_id] = self._living_spare()
            self._selector.register(fork.verdict, selectors.EVENT_READ, fork)
            fork.begin(trial_id, payload)
            self._spare = Fork(self._trial, self._limits)
        elif kind == CANCEL and trial_id in self._running:
            self._end(self._running[trial_id])

    def _living_spare(self) -> Fork:
        """The fork that waits; another one if somebody killed it."""
        if self._spare.has_died():
            self._spare = Fork(self._trial, self._limits)
        return self._spare

    def _hear(self, fork: Fork) -> None:
        """More of a verdict, or its end."""
        if fork.id not in self._running:
            return
        part = os.read(fork.verdict, 1 << 16)
        fork.data += part
        if part and len(fork.data) <= _MAX_VERDICT:
            return
        code = self._end(fork) if part else self._forget(fork)
        if code == 0:
            self._reply(VERDICT, fork.id, fork.data)
        else:
            late = code in (-signal.SIGPROF, -signal.SIGXCPU)
            self._reply(KILLED, fork.id, OUT_OF_TIME if late else DIED)

    def _end_late(self) -> None:
        now = time.monotonic()
        for fork in [fork for fork in self._running.values() if fork.deadline <= now]:
            self._end(fork)
            self._reply(KILLED, fork.id, OUT_OF_TIME)

    def _end(self, fork: Fork) -> int:
        fork.kill()
        return self._forget(fork)

    def _forget(self, fork: Fork) -> int:
        del self._running[fork.id]
        self._selector.unregister(fork.verdict)
        return fork.reap()

    def _reply(self, kind: bytes, trial_id: int, payload: bytes = b"") -> None:
        self._replies.write(HEADER.pack(len(payload), kind, trial_id) + payload)
        self._replies.flush()


def main() -> None:
    """Read the settings (a pickle: settings, limits), load everything, say READY, and serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end is ours
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
            replies.write(HEADER.pack(len(text), FAILED, 0) + text)
            replies.flush()
            return
        helper._reply(READY, 0)
        helper.run()
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone, or wants no more; the forks follow


def _prepared(settings: dict[str, Any]) -> Any:
    from cfg_core.vllm_plugin.grammar_trial import Trial, quiet

    quiet()
    trial = Trial(settings)
    trial.warm_up()
    return trial


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
