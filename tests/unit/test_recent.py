"""deployments/http/recent.py: many callers share one recent answer."""

import asyncio

import pytest

from deployments.http import recent
from deployments.http.recent import Recent


class Source:
    def __init__(self, takes_s=0.0):
        self.asked, self.takes_s, self.error = 0, takes_s, None

    async def __call__(self):
        self.asked += 1
        asked = self.asked
        await asyncio.sleep(self.takes_s)
        if self.error:
            raise self.error
        return asked


async def test_concurrent_callers_share_one_call():
    source = Source(0.02)
    value = Recent(source)
    assert await asyncio.gather(*(value.value() for _ in range(100))) == [1] * 100


async def test_an_old_answer_is_refreshed(monkeypatch):
    source = Source()
    value = Recent(source)
    assert [await value.value(), await value.value()] == [1, 1]
    monkeypatch.setattr(recent, "FRESH_S", 0.0)
    assert await value.value() == 2


async def test_callers_get_the_last_answer_if_a_new_one_is_slow(monkeypatch):
    monkeypatch.setattr(recent, "FRESH_S", 0.0)
    monkeypatch.setattr(recent, "PATIENCE_S", 0.01)
    source = Source()
    value = Recent(source)
    await value.value()
    source.takes_s = 0.1
    assert await value.value() == 1
    assert source.asked == 2
    monkeypatch.setattr(recent, "OLD_S", 0.0)
    assert await value.value() == 2


async def test_an_error_is_raised_to_all_callers_and_not_kept():
    source = Source(0.02)
    source.error = ValueError("broken")
    value = Recent(source)
    told = await asyncio.gather(*(value.value() for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in told] == ["broken"] * 3
    source.error = None
    assert await value.value() == 2


async def test_a_cancelled_caller_does_not_cancel_others():
    source = Source(0.05)
    value = Recent(source)
    first, second = (asyncio.ensure_future(value.value()) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 1
