"""The forked processes of the grammar helper: each tries one grammar under limits, then ends."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from contextlib import suppress
from typing import Any, NoReturn

STACK_BYTES = 4 << 20
"""Stack of a fork, in bytes.

The engine's threads have more (8 MiB). A grammar that recurses too deeply for them kills the fork
first.
"""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process when the process `parent` ends, for whatever reason."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class Fork:
    """A forked process: it reads one request, writes one verdict, and ends."""

    def __init__(self, trial: Any, limits: dict[str, Any]) -> None:
        """limits: `wall_s`, and `memory_bytes` beyond what the process has already.

        The limit of CPU time, `cpu_s`, comes with the request.
        """
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
        """Send the request to the fork, and start its deadline."""
        self.id, self.deadline = trial_id, time.monotonic() + self._wall_s
        with suppress(BrokenPipeError), os.fdopen(self._request, "wb") as stream:
            stream.write(payload)  # if it has died, the helper reports that as for any other fork

    def has_died(self) -> bool:
        """Whether the fork ended before it got a request.

        If so, it is reaped here and cannot be used any more.
        """
        died = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        if died:
            os.close(self._request)
            os.close(self.verdict)
        return died

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the fork to end. Returns its exit code, or minus the signal that ended it.

        This blocks, so the fork must be near its end.
        """
        os.close(self.verdict)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _serve_one(trial: Any, limits: dict[str, Any], request_end: int, verdict_end: int) -> NoReturn:
    """What a fork runs: it reads a request, tries the grammar, writes the verdict, and exits."""
    code = 1
    try:
        die_with_parent(os.getppid())
        with os.fdopen(request_end, "rb") as stream:
            payload = stream.read()
        if payload:
            request = json.loads(payload)
            _limit(request["cpu_s"], limits["memory_bytes"])
            verdict = json.dumps(trial.run(request)).encode()
            with os.fdopen(verdict_end, "wb") as stream:
                stream.write(verdict)
            code = 0
    finally:
        os._exit(code)


def _limit(cpu_s: float, memory_bytes: int) -> None:
    seconds = int(time.process_time() + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    # The timer is exact, the limit is in whole seconds. Both end the process.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + memory_bytes,) * 2)
    resource.setrlimit(
        resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1])
    )
    os.nice(5)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
