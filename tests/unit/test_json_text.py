"""deployments/encoder/json_text.py: the text of json.dumps, in pieces."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.encoder.json_text import json_text

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=30)


def dumped(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@given(VALUES)
def test_any_value(value):
    assert json_text(value) == dumped(value)


@pytest.mark.parametrize("length", [1999, 2000, 2001, 6000])
def test_long_lists(length):
    value = {"data": [[i / 7 for i in range(length)], []], "ids": list(range(length)), "empty": {}}
    assert json_text(value) == dumped(value)


def test_other_threads_run_meanwhile():
    value = {"data": [i / 7 for i in range(400_000)]}
    gaps, done = [], threading.Event()

    def watch():
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    json_text(value)
    done.set()
    watcher.join()
    assert len(gaps) > 10, "json.dumps would block all other threads for a quarter of a second"
