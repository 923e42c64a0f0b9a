"""Which tenant may have a grammar compiled next, and what is remembered of the last ones.

No tenant can keep the others waiting, and no request leaves a place taken.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from cfg_core.errors import OverloadedError
from cfg_core.grammars import trials
from cfg_core.grammars.trials import FairPlaces, Verdicts


class Tenants:
    """Tasks that hold a place until they are released. `order`: who got a place, in turn."""

    def __init__(self, places: FairPlaces) -> None:
        self.places, self.order = places, []
        self.held: dict[str, list[asyncio.Event]] = {}

    def ask(self, tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._hold(tenant))

    async def _hold(self, tenant: str) -> None:
        async with self.places.hold(tenant):
            self.order.append(tenant)
            done = asyncio.Event()
            self.held.setdefault(tenant, []).append(done)
            await done.wait()

    async def let_go(self, tenant: str) -> None:
        self.held[tenant].pop(0).set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_tenant_leaves_a_place_to_others() -> None:
    tenants = Tenants(FairPlaces(3, 10))
    asked = [tenants.ask("many") for _ in range(6)]
    await settle()
    assert tenants.order == ["many", "many"]
    asked.append(tenants.ask("one"))
    await settle()
    assert tenants.order == ["many", "many", "one"]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_tenants_take_turns_at_a_single_place() -> None:
    tenants = Tenants(FairPlaces(1, 10))
    asked = [tenants.ask(name) for name in ("a", "a", "a", "b", "c")]
    await settle()
    for _ in range(5):
        await tenants.let_go(tenants.order[-1])
    assert tenants.order == ["a", "b", "c", "a", "a"]
    await asyncio.gather(*asked)


async def test_a_tenant_with_too_many_waiting_grammars_is_refused() -> None:
    tenants = Tenants(FairPlaces(1, 2))
    asked = [tenants.ask("a") for _ in range(3)]
    await settle()
    with pytest.raises(OverloadedError):
        async with tenants.places.hold("a"):
            pass
    asked.append(tenants.ask("b"))
    await settle()
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_cancellation_at_any_moment_frees_every_place() -> None:
    rng = random.Random(5)
    places, inside = FairPlaces(3, 100), Counter()

    async def hold(tenant: str) -> None:
        async with places.hold(tenant):
            inside[tenant] += 1
            assert sum(inside.values()) <= 3
            assert inside[tenant] <= 2
            try:
                await asyncio.sleep(rng.random() / 1000)
            finally:
                inside[tenant] -= 1

    for _ in range(30):
        tasks = [asyncio.create_task(hold(rng.choice("abc"))) for _ in range(40)]
        for task in rng.sample(tasks, 20):
            asyncio.get_running_loop().call_later(rng.random() / 200, task.cancel)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert places.waiting == 0
        assert sum(places._held.values()) == 0
        assert places._free == 3
        assert not places._served


def test_refusals_that_depend_on_the_machine_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "COSTLY_S", 0.05)
    known = Verdicts(most=2)
    known.keep(b"costly", {"refused": "slow", "costly": True})
    known.keep(b"invalid", {"refused": "invalid", "costly": False})
    assert known.get(b"costly") is not None
    time.sleep(0.1)
    assert known.get(b"costly") is None
    assert known.get(b"invalid") is not None


def test_the_last_ones_are_remembered() -> None:
    known = Verdicts(most=2)
    for key in (b"first", b"second"):
        known.keep(key, {"backend": "xgrammar"})
    assert known.get(b"first") is not None  # and is now the last one that was used
    known.keep(b"third", {})
    assert known.get(b"second") is None
    assert known.get(b"first") is not None
    assert known.get(b"third") == {}
