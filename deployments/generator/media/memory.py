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
from threading import Condition, Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from cfg_core.errors import CapacityError, OverloadedError
from cfg_core.memory import DelayedTrim
from deployments.generator.media.downloads import ClientDownloads, Downloads, ended

T = TypeVar("T")

REQUEST_BYTES = 2**30
"""Decoded media of one request at a time. 32 images of 3840 x 2160 pixels have 1,062 million."""

REPLICA_BYTES = 2 * REQUEST_BYTES
"""Decoded media of all requests of one replica at a time."""

CLIENT_BYTES = REQUEST_BYTES
"""Decoded media of all requests of one client at a time, so that others find room.

vLLM prepares the images of one request after the other, at about 300 MB a second.
"""

TRIMMED_BYTES = 2**22
"""A file or a decoded item after whose request freed memory goes back to the system."""

WORKING_BYTES = 2**30
"""What decoders need beside the images that they make, in one replica."""

CLIENT_DECODERS = 2
"""Threads that decode for one client at a time. vLLM's pool has 8 of them."""


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


class Working:
    """Bytes that decoders need until they have finished. Who finds none waits.

    Nobody waits for ever: who has some needs nothing else, and gives them back.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._changed = Condition()

    @contextmanager
    def lent(self, size: int) -> Iterator[None]:
        """Hold so many bytes, or all of them if there are not as many. Called in threads."""
        size = min(size, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


# An error that vLLM raises among several is in a cycle with its frames, which hold the files.
_trim = DelayedTrim(collects=True)
REPLICA = Budget(REPLICA_BYTES)
WORKING = Working(WORKING_BYTES)


class Client:
    """What all requests of one client may have at a time.

    lookups: names that are being looked up.
    preparing: held by the request whose media vLLM prepares.
    """

    def __init__(self) -> None:
        self.bytes = Budget(CLIENT_BYTES)
        self.downloads = ClientDownloads()
        self.decoders = asyncio.Semaphore(CLIENT_DECODERS)
        self.preparing = asyncio.Lock()
        self.lookups = 0


_clients: WeakValueDictionary[str, Client] = WeakValueDictionary()


class MediaShare:
    """What one request may have at a time: bytes of decoded media, and downloads.

    client: whose request it is. Default: one of its own.
    is_large: something large was decoded or fetched, whose memory will be free.
    unknown: held while something is decoded whose size is not known before.
    """

    def __init__(
        self,
        replica: Budget = REPLICA,
        limit: int = REQUEST_BYTES,
        client: Client | None = None,
    ) -> None:
        self._limit = limit
        self._own = Budget(limit)
        self._replica = replica
        self.client = client or Client()
        self.downloads = Downloads(self.client.downloads)
        self.unknown = asyncio.Lock()
        self.is_open = True
        self.is_large = False

    def end(self) -> None:
        """End what is still read: the request has ended."""
        self.is_open = False
        self.downloads.end(ended())

    def load(self, expected: int, load: Callable[[], T], size_of: Callable[[T], int]) -> T:
        """Call `load` if there is room for `expected` bytes, and count what it returns.

        size_of: the bytes of that. They are given back when it is deleted.

        Raises CapacityError if the request can never have as much, and OverloadedError if others
        have the rest now.
        """
        if not self.is_open:
            raise ended()
        with self.reserved(expected):
            loaded = load()
            size = size_of(loaded)
        self._take(size)
        self.is_large |= size > TRIMMED_BYTES
        weakref.finalize(owner_of(loaded), self._give, size).atexit = False
        return loaded

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Hold so many bytes. Raises as `load` does."""
        self._take(size)
        try:
            yield
        finally:
            self._give(size)

    def _take(self, size: int) -> None:
        if not self._own.take(size):
            raise CapacityError(
                f"The images, audio and video of the request have more than {self._limit >> 20} MB"
                " together when they are decoded: send fewer, or smaller ones.",
                "messages",
            )
        if not self.client.bytes.take(size):
            self._own.give(size)
            raise OverloadedError(
                "Your other requests have as many images, audio and video as the server reads for"
                " one client: send this one again when they have ended.",
                reason="media",
            )
        if not self._replica.take(size):
            self._own.give(size)
            self.client.bytes.give(size)
            raise OverloadedError(
                "The server is reading as many images, audio and video as it can hold: send the"
                " request again later.",
                reason="media",
            )

    def _give(self, size: int) -> None:
        self._own.give(size)
        self.client.bytes.give(size)
        self._replica.give(size)


def owner_of(loaded: Any) -> Any:
    """What holds the memory of a decoded item: a Pillow image, or an array of samples or frames.

    vLLM wraps images and video with their files, and pairs audio and video with their rates.
    """
    media = getattr(loaded, "media", loaded)
    return media[0] if isinstance(media, tuple) else media


_share: ContextVar[MediaShare | None] = ContextVar("cfg_serve_media_share", default=None)


@contextmanager
def one_request(client: str = "") -> Iterator[None]:
    """While open, what this task and the tasks that it starts read is one request's.

    client: the name of who sent it.
    """
    share = MediaShare(client=_clients.setdefault(client, Client()))
    _share.set(share)
    try:
        yield
    finally:
        share.end()
        if share.is_large:
            _trim.schedule()
        if _share.get() is share:  # a generator may be closed in another task
            _share.set(None)


def current_share() -> MediaShare:
    """The share of the request that this task serves."""
    share = _share.get()
    return MediaShare() if share is None else share
