"""Start a process in a session of its own, and end every process below this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def spawn(command: Sequence[str], env: dict[str, str], log: int) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which writes into the file `log`.

    Ctrl-C then reaches only this process, which ends the others in order.
    """
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """Adopt the orphans among the processes below this one; on exit, end all that still run."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for sig in STOP_SIGNALS:
            signal.signal(sig, signal.SIG_IGN)  # nothing interrupts the sweep
        for sig, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
            wait_for(lambda: not descendants(), patience_s)


def descendants() -> list[int]:
    """The ids of all processes below this one, read from /proc after reaping those that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found = children.get(os.getpid(), [])
    for pid in found:  # the loop also reaches the pids that it appends
        found.extend(children.get(pid, []))
    return found


def stop(process: subprocess.Popen[bytes], sig: signal.Signals, patience_s: float) -> None:
    if process.poll() is None:
        os.killpg(process.pid, sig)
        wait_for(lambda: process.poll() is not None, patience_s)


def wait_for(done: Callable[[], bool], patience_s: float) -> None:
    limit = time.monotonic() + patience_s
    while not done() and time.monotonic() < limit:
        time.sleep(0.1)
