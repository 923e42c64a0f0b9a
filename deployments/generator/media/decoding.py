"""Decodes images, audio and video with vLLM's readers, in the memory that is left for it.

What may be decoded at all is in deployments/generator/media/files.py. Importing this module imports
vllm, so only a replica does it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pybase64
import vllm.envs as envs
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.connector import global_thread_pool

from cfg_core.errors import CfgServeError
from deployments.generator.media.files import MediaFileError, Medium, check_file
from deployments.generator.media.memory import TRIMMED_BYTES, WORKING, MediaShare, owner_of
from deployments.generator.media.videos import load_video

logger = logging.getLogger("ray.serve")

WORK = {"PNG": 12, "JPEG": 8, "WEBP": 20, "GIF": 12, "BMP": 12, "AVIF": 12}
"""Bytes for each pixel that a reader of a format needs at most until it has finished (measured)."""

MAX_JPEG_FRAMES = 1024
"""Images of a `data:video/jpeg` address."""

JPEG_FRAME_BYTES = 12
"""Bytes for each pixel of one: Pillow's image, its array, and the array of all frames."""

_ADVICE = re.compile(r" Set VLLM_\w+ to increase this limit\.")
"""What vLLM tells its operator, in errors for the client."""


class BoundedMediaIO:
    """A MediaIO of vLLM that decodes what has room in the memory for it."""

    def __init__(self, media_io: Any, share: MediaShare) -> None:
        self._media_io = media_io
        self.share = share
        self.is_image = isinstance(media_io, ImageMediaIO)

    @property
    def _medium(self) -> Medium:
        if self.is_image:
            return "image"
        return "video" if isinstance(self._media_io, VideoMediaIO) else "audio"

    def max_bytes(self) -> int:
        """The maximum size of a file."""
        limits = (envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB * 2**20, self._media_io.get_max_bytes())
        return min(limit or 2**62 for limit in limits)

    def load_bytes(self, data: bytes) -> Any:
        self._check_size(len(data))
        name = check_file(data, self._medium)
        load = partial(self._media_io.load_bytes, data)
        if self._medium == "image":
            pixels = pixels_of(data, name)
            return self._load(4 * pixels, partial(_working, WORK[name] * pixels, load))
        if self._medium == "video":
            return self._load(0, partial(load_video, self._media_io, data, self.share))
        return self._load(envs.VLLM_MAX_AUDIO_DECODE_BYTES, load)

    def load_base64(self, media_type: str, text: str) -> Any:
        self._check_size(len(text) * 3 // 4)
        if self._medium == "video" and media_type == "video/jpeg":  # images with commas between
            load = partial(self._media_io.load_base64, media_type, text)
            return self._load(sum(map(_frame_bytes, self._frames(text))), load)
        return self.load_bytes(_from_base64(text))

    def load_file(self, path: Path) -> Any:
        """Load a file of the server. Raises OSError if it is none."""
        if not path.is_file():
            raise FileNotFoundError(path)
        self._check_size(path.stat().st_size)
        return self.load_bytes(path.read_bytes())

    def _frames(self, text: str) -> Iterable[str]:
        most = self._media_io.num_frames
        if not 0 < most <= MAX_JPEG_FRAMES:
            most = MAX_JPEG_FRAMES
            if text.count(",") >= most:
                raise MediaFileError(f"it has more than {most} images: send fewer.")
        return text.split(",", most)[:most]

    def _check_size(self, size: int) -> None:
        self.share.is_large |= size > TRIMMED_BYTES
        if size > self.max_bytes():
            raise MediaFileError(f"it has more than {self.max_bytes()} bytes: send a smaller one.")

    def _load(self, expected: int, load: Callable[[], Any]) -> Any:
        """expected: bytes that are reserved until the size is known."""
        return self.share.load(expected, load, _size_of)


def _working(size: int, load: Callable[[], Any]) -> Any:
    with WORKING.lent(size):
        return load()


def _from_base64(text: str) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        raise MediaFileError("its base64 is not valid.") from None


def pixels_of(data: bytes, name: str) -> int:
    """The number of pixels that the header of an image shows. Raises MediaFileError if too many.

    name: its format, as Pillow names it.
    """
    most = envs.VLLM_MAX_IMAGE_PIXELS
    try:
        width, height = Image.open(BytesIO(data), formats=[name]).size
    except Image.DecompressionBombError:
        raise MediaFileError(
            f"it has more than {most} pixels: send a smaller one, of fewer pixels."
        ) from None
    if 0 < most < width * height:
        raise MediaFileError(
            f"it has {width} x {height} pixels, and at most {most} are read: send a smaller one."
        )
    return int(width * height)


def _frame_bytes(text: str) -> int:
    data = _from_base64(text)
    return JPEG_FRAME_BYTES * pixels_of(data, check_file(data, "image"))


def _size_of(loaded: Any) -> int:
    """Bytes of something decoded. Pillow has four for a pixel of RGB."""
    owner = owner_of(loaded)
    return int(owner.nbytes) if hasattr(owner, "nbytes") else int(owner.width * owner.height * 4)


async def in_thread(load: Callable[[], Any], counted: BoundedMediaIO) -> Any:
    """Decode in a thread of vLLM's pool; audio and video of a request one after the other.

    These take much memory while they are decoded. One client never has all threads.
    """
    share = counted.share
    async with nullcontext() if counted.is_image else share.unknown, share.client.decoders:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(global_thread_pool, decoded, load)


def decoded(load: Callable[[], Any]) -> Any:
    """What `load` returns. Raises VLLMValidationError: what cannot be decoded, the client sent."""
    try:
        return load()
    except (VLLMValidationError, CfgServeError, MemoryError):
        raise
    except MediaFileError as error:
        raise refused(str(error)) from None
    except ImportError as error:
        logger.warning("An image, audio or video was refused: %s", error)
        raise refused("this server has no package that decodes it.") from error
    except Exception as error:  # readers raise what they like
        logger.info("An image, audio or video was refused: %s", type(error).__name__)
        raise refused(_reason(str(error))) from error


def _reason(text: str) -> str:
    """A sentence about a file that a reader did not like. Most of their texts are Python's."""
    if "truncated" in text:
        return "it is truncated."
    if "VLLM_" in text:  # of vLLM, about its limits
        return f"{_ADVICE.sub('', text).rstrip('. ')}."
    return "it is damaged: its data do not fit its header."


def refused(sentence: str) -> VLLMValidationError:
    """The error for an image, audio or video, which a client gets with status 400."""
    return VLLMValidationError(
        f"An image, audio or video cannot be used: {sentence}", parameter="messages"
    )
