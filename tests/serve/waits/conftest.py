"""How long clients of a server wait, so no other test may run beside: see the Makefile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.serve.stories_fixtures import client, http, model, server
from tests.support.quick_starts import QUICK_START


@pytest.fixture(scope="package", autouse=True)
def own_thresholds() -> Iterator[None]:
    """Let servers collect garbage as often as for users, because clients wait for that, too."""
    places = os.environ["PYTHONPATH"].split(os.pathsep)
    with pytest.MonkeyPatch.context() as patch:
        kept = [place for place in places if place != QUICK_START]
        patch.setenv("PYTHONPATH", os.pathsep.join(kept))
        yield


__all__ = ["client", "http", "model", "server"]  # fixtures
