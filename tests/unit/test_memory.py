"""cfg_core/memory.py: freed memory goes back to the system once no large work is running."""

import ctypes
import gc
import threading
import time
import weakref

import psutil
import pytest

from cfg_core import memory
from cfg_core.lanes import LARGE_TEXT, Lanes

PIECES, PIECE_BYTES = 100_000, 2_000


@pytest.mark.skipif(memory._malloc_trim is None, reason="a C library without malloc_trim")
def test_memory_that_was_freed_in_small_pieces_goes_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE_BYTES)
    keeps = pieces.pop()  # the last one: malloc keeps all memory below it until malloc_trim
    for piece in pieces:
        libc.free(piece)
    before = psutil.Process().memory_info().rss
    memory.trim()
    assert before - psutil.Process().memory_info().rss > 0.8 * PIECES * PIECE_BYTES
    libc.free(keeps)


@pytest.fixture
def given_back(monkeypatch):
    """Set each time that memory is given back; `count` says how often that was."""
    event = threading.Event()
    event.count = 0

    def trim():
        event.count += 1
        event.set()

    monkeypatch.setattr(memory, "trim", trim)
    monkeypatch.setattr(memory, "TRIM_DELAY_S", 0.1)
    return event


def test_large_work_one_after_another_gives_back_once(given_back):
    rest = memory.DelayedTrim()
    for _ in range(20):
        rest.schedule()
    assert given_back.wait(5)
    time.sleep(0.3)
    assert given_back.count == 1


async def test_memory_is_given_back_only_after_texts_above_the_threshold(given_back):
    lanes = Lanes("test")
    await lanes.run(LARGE_TEXT, len, "")
    assert not given_back.wait(0.3)
    await lanes.run(LARGE_TEXT + 1, len, "")
    assert given_back.wait(5)
    lanes.close()


def test_closing_drops_it(given_back):
    rest = memory.DelayedTrim()
    rest.schedule()
    rest.close()
    assert not given_back.wait(0.3)


def test_what_only_errors_in_cycles_hold_is_freed(monkeypatch):
    """An error in a local variable of a frame that it passed holds all frames below it."""
    monkeypatch.setattr(memory, "TRIM_DELAY_S", 0.01)

    class File:
        pass

    def fails(file):
        raise ValueError(file)

    def kept(file):
        error = None
        try:
            fails(file)
        except ValueError as caught:
            error = caught
        assert error is not None
        return weakref.ref(file)

    gc.disable()
    try:
        file = kept(File())
        assert file() is not None
        memory.DelayedTrim(collects=True).schedule()
        deadline = time.monotonic() + 5
        while file() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert file() is None
    finally:
        gc.enable()


def test_thresholds_of_a_start_end_with_it():
    before = gc.get_threshold()

    def fails():
        with memory.quick_start():
            assert gc.get_threshold() == memory.STARTING
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert gc.get_threshold() == before
