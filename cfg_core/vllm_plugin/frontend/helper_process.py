"""HelperProcess: the grammar helper's process, as the frontend starts it, asks it and ends it.

It exchanges frames with the helper (grammar_helper/frames.py).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from typing import Any

from cfg_core.grammars.trials import WALL_S, GrammarLimits
from cfg_core.vllm_plugin.grammar_helper import frames

HELPER = "cfg_core.vllm_plugin.grammar_helper"
"""The module that is run as the helper process."""

START_S = 120.0
"""Seconds that the helper has to load. If it is not ready then, requests with a grammar get 429."""

IDLE_S = 900.0
"""Seconds without a grammar after which the helper ends, if `at_start` is false."""

_ENVIRONMENT = {
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0",  # vLLM's timeout needs threads, which cannot be killed
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",  # forking is safe only with one thread
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class HelperGoneError(Exception):
    """The helper process ended, or never became ready."""


class HelperProcess:
    """One process of the grammar helper, from its start to its end.

    It ends when it is closed or when this process ends. Without `at_start`, it also ends when it
    has been idle for IDLE_S.
    """

    def __init__(self, settings: Mapping[str, Any], limits: GrammarLimits) -> None:
        self._limits, self._first = limits, _first_frame(settings, limits)
        self._asked: dict[int, asyncio.Future[tuple[bytes, bytes]]] = {}
        self._count = 0
        self._process: asyncio.subprocess.Process | None = None
        self._used = time.monotonic()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live())

    @property
    def gone(self) -> bool:
        return self._life.done()

    async def ready(self) -> None:
        """Return once the helper can be asked. Raises HelperGoneError if it never can."""
        await asyncio.shield(self._started)

    async def ask(self, payload: bytes) -> tuple[bytes, bytes]:
        """Send one request, and return kind and payload of the answer.

        Raises HelperGoneError if the helper has ended. Cancelling the call ends the trial.
        """
        if self.gone:
            raise HelperGoneError("it has ended")
        self._count += 1
        number, self._used = self._count, time.monotonic()
        answer: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(frames.TRY, number, payload)
            return await answer
        except asyncio.CancelledError:
            self._send(frames.CANCEL, number)
            raise
        finally:
            self._asked.pop(number, None)
            self._used = time.monotonic()

    def close(self) -> None:
        self._life.cancel()

    def _send(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        if self._process is not None and self._process.stdin is not None and not self.gone:
            self._process.stdin.write(frames.frame(kind, number, payload))

    async def _live(self) -> None:
        reason = "it has ended"
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                HELPER,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env=_environment(),
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._first)
            async with asyncio.timeout(START_S):
                await self._hear(process.stdout)
            while await self._hear_until_idle(process.stdout):
                pass
        except (HelperGoneError, OSError, EOFError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        finally:
            self._end(reason)

    async def _hear_until_idle(self, stream: asyncio.StreamReader) -> bool:
        """Take one frame from the helper. Returns False if it has been idle and is to end.

        It is idle if nobody has asked for IDLE_S seconds. With `at_start` it never ends for that
        reason.
        """
        try:
            async with asyncio.timeout(None if self._limits.at_start else IDLE_S):
                await self._hear(stream)
        except TimeoutError:
            return bool(self._asked) or time.monotonic() - self._used < IDLE_S
        return True

    async def _hear(self, stream: asyncio.StreamReader) -> None:
        """Take one frame from the helper, and give it to whoever waits for it.

        Raises HelperGoneError if the frame says that the helper failed.
        """
        size, kind, number = frames.HEADER.unpack(await stream.readexactly(frames.HEADER.size))
        payload = await stream.readexactly(size)
        if kind == frames.FAILED:
            raise HelperGoneError(payload.decode("utf-8", "replace"))
        if kind == frames.READY:
            self._started.set_result(None)
        elif number in self._asked and not self._asked[number].done():
            self._asked[number].set_result((kind, payload))

    def _end(self, reason: str) -> None:
        """Give HelperGoneError to everybody who waits, and kill the helper."""
        everybody: list[asyncio.Future[Any]] = [self._started, *self._asked.values()]
        for waiting in everybody:
            if not waiting.done():
                waiting.set_exception(HelperGoneError(reason))
                waiting.exception()  # asyncio warns of errors that nobody retrieves
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _first_frame(settings: Mapping[str, Any], limits: GrammarLimits) -> bytes:
    ours = {"wall_s": WALL_S, "memory_bytes": limits.memory_mb << 20}
    payload = pickle.dumps((os.getpid(), settings, ours))
    return struct.pack("!I", len(payload)) + payload


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        **_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
