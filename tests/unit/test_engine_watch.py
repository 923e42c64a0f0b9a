"""The pulse of an engine: it hangs, it is slow, or this process itself did not run."""

from __future__ import annotations

import asyncio

import pytest

from cfg_core.errors import EngineError
from deployments.health import engine_watch
from deployments.health.engine_watch import REPORTED_AT, Pulse


class Engine:
    """It answers while `answers` is set."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked = 0

    async def __call__(self) -> dict[str, int]:
        self.asked += 1
        await self.answers.wait()
        return {"running": 3}


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "PULSE_S", 0)


def test_an_engine_that_does_not_answer_hangs(at_once: None) -> None:
    async def play() -> None:
        engine, time = Engine(), 0.0
        pulse = Pulse(engine, 6.0, lambda: time)
        running = asyncio.create_task(pulse.run())
        await turns()
        looks = []
        for _ in range(35):
            time += 0.2
            looks.append(pulse.look())
        assert looks.index(True) in (29, 30), "after six seconds"
        running.cancel()

    asyncio.run(play())


def test_seconds_in_which_this_process_did_not_run_do_not_count(at_once: None) -> None:
    """The engine's answer may be in the socket. A watch that read the clock took it for hanging."""

    async def play() -> None:
        engine, time = Engine(), 0.0
        pulse = Pulse(engine, 6.0, lambda: time)
        running = asyncio.create_task(pulse.run())
        await turns()
        time += 60.0
        assert not pulse.look()
        engine.answers.set()
        await turns()
        assert pulse.stats["running"] == 3
        assert REPORTED_AT in pulse.stats
        time += 60.0
        assert not pulse.look()
        running.cancel()

    asyncio.run(play())


def test_an_engine_that_answers_with_an_error_does_not_hang(at_once: None) -> None:
    async def failing() -> dict[str, int]:
        raise EngineError("it is dead")

    async def play() -> None:
        time = 0.0
        pulse = Pulse(failing, 6.0, lambda: time)
        running = asyncio.create_task(pulse.run())
        for _ in range(100):
            await turns()
            time += 0.2
            assert not pulse.look()
        running.cancel()

    asyncio.run(play())
