"""The short attacks of tools/hostile, on the server that all tests of this folder share.

`python -m tools.hostile` plays all attacks, with stricter bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tools.hostile.attacks  # noqa: F401 - its import registers them
from tools.hostile.attempt import ATTACKS
from tools.hostile.stage import Stage
from tools.hostile.verdict import Bounds
from tools.serving.process import ServeProcess

LOOSE = Bounds(extra_wait_s=20.0, ready_s=10.0, memory=2.0)
"""Slow answers are not a fault here, because the machine may do other work.

Wrong answers, 500 and dead engines are faults.
"""

BOUNDED = [name for name, attack in ATTACKS.items() if attack.bounded]


@pytest.fixture(scope="module")
def stage(server: ServeProcess) -> Iterator[Stage]:
    with Stage(server.url, warm_up_s=4.0, calm_s=1.0, bounds=LOOSE) as stage:
        yield stage


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_attacks(stage: Stage, name: str) -> None:
    row = stage.play(ATTACKS[name], 0)
    print(row)
    assert row.complaints(LOOSE) == []
