"""How much memory images, audio and video may have while they are read.

A file of 100 kB may be an image of 200 MB. So memory is taken before something is decoded, and
given back when nothing holds it any more. What finds no room is refused: a request that waited
would hold what it has, and could wait for ever.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, TypeVar

from cfg_core.errors import CapacityError, OverloadedError

T = TypeVar("T")

REQUEST_BYTES = 2**30
"""Decoded media of one request at a time. 32 images of 3840 x 2160 pixels have 1,062 million."""

REPLICA_BYTES = 2 * REQUEST_BYTES
"""Decoded media of all requests of one replica at a time."""

REQUEST_DOWNLOADS = 4
"""Downloads of one request at a time, so that slow hosts of one client delay no other's."""


class Budget:
    """A number of bytes. Used from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._returned: deque[int] = deque()
        self._lock = Lock()

    def take(self, size: int) -> bool:
        """Take so many bytes. Returns False if there are not as many."""
        with self._lock:
            while self._returned:
                self._used -= self._returned.popleft()
            if self._used + size > self._limit:
                return False
            self._used += size
            return True

    def give(self, size: int) -> None:
        """Give bytes back. It takes no lock, because the garbage collector may call it."""
        self._returned.append(size)


REPLICA = Budget(REPLICA_BYTES)


class MediaShare:
    """What one request may have at a time: bytes of decoded media, and downloads.

    unknown: held while something is decoded whose size is not known before.
    """

    def __init__(self, replica: Budget = REPLICA, limit: int = REQUEST_BYTES) -> None:
        self._limit = limit
        self._own = Budget(limit)
        self._replica = replica
        self.downloads = asyncio.Semaphore(REQUEST_DOWNLOADS)
        self.unknown = asyncio.Lock()
        self.is_open = True

    def check_open(self) -> None:
        """Raise CapacityError if the request has ended.

        vLLM starts all downloads of a request together. If one fails, the others remain.
        """
        if not self.is_open:
            raise CapacityError("The request has ended.")

    def load(self, expected: int, load: Callable[[], T], size_of: Callable[[T], int]) -> T:
        """Call `load` if there is room for `expected` bytes, and count what it returns.

        size_of: the bytes of that. They are given back when it is deleted.

        Raises CapacityError if the request can never have as much, and OverloadedError if others
        have the rest now.
        """
        self._take(expected)
        try:
            loaded = load()
        except BaseException:
            self._give(expected)
            raise
        size = size_of(loaded)
        self._give(expected)
        self._take(size)
        weakref.finalize(owner_of(loaded), self._give, size).atexit = False
        return loaded

    def _take(self, size: int) -> None:
        if not self._own.take(size):
            raise CapacityError(
                f"The images, audio and video of the request have more than {self._limit >> 20} MB"
                " together when they are decoded: send fewer, or smaller ones.",
                "messages",
            )
        if not self._replica.take(size):
            self._own.give(size)
            raise OverloadedError(
                "The server is reading as many images, audio and video as it can hold: send the"
                " request again later.",
                reason="media",
            )

    def _give(self, size: int) -> None:
        self._own.give(size)
        self._replica.give(size)


def owner_of(loaded: Any) -> Any:
    """What holds the memory of a decoded item: a Pillow image, or an array of samples or frames.

    vLLM wraps images and video with their files, and pairs audio and video with their rates.
    """
    media = getattr(loaded, "media", loaded)
    return media[0] if isinstance(media, tuple) else media


_share: ContextVar[MediaShare | None] = ContextVar("cfg_serve_media_share", default=None)


@contextmanager
def one_request() -> Iterator[None]:
    """While open, what this task and the tasks that it starts read is one request's."""
    share = MediaShare()
    _share.set(share)
    try:
        yield
    finally:
        share.is_open = False
        if _share.get() is share:  # a generator may be closed in another task
            _share.set(None)


def current_share() -> MediaShare:
    """The share of the request that this task serves."""
    share = _share.get()
    return MediaShare() if share is None else share
