"""Programs in processes of their own, without the seconds that each would take to import vLLM.

One process imports vLLM's engine arguments and nothing of ours. Each program runs in a fork of it,
in which no plugin has been loaded and nothing is patched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from typing import Any, Self

LIMIT_S = 120
"""For one program."""


class WarmProcess:
    """Runs programs in forks. Use it as a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, program: str) -> str:
        """What a program prints. A program that fails, fails the test with what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(program) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that has imported vLLM has ended"
        status, printed = json.loads(answer)
        assert status == 0, printed
        return str(printed)


def _serve() -> None:
    import vllm.engine.arg_utils
    import vllm.plugins  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_in_fork(json.loads(line))), flush=True)


def _in_fork(program: str) -> tuple[int, str]:
    """The exit status of a program, and what it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run(program, writer)
    os.close(writer)
    with os.fdopen(reader) as printed:
        told = printed.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told


def _run(program: str, writer: int) -> None:
    """Run a program in this process, which ends with it. What it prints goes to `writer`."""
    import signal

    signal.alarm(LIMIT_S)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(writer, stream)
    os.close(writer)
    status = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
