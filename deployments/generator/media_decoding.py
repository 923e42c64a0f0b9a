"""Decodes images, audio and video with vLLM's readers, in the memory that is left for it.

Importing this module imports vllm, so only a replica does it.
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
from PIL import UnidentifiedImageError
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO
from vllm.multimodal.media.connector import global_thread_pool

from cfg_core.errors import CfgServeError
from deployments.generator.media_memory import MediaShare, owner_of

logger = logging.getLogger("ray.serve")

UNKNOWN_BYTES = 256 * 2**20
"""Bytes that are reserved for a video while it is decoded."""

_OBJECT = re.compile(r" ?<\S+ object at 0x\w+>")
"""How Python shows the file that is read. It tells the client nothing."""


class Counted:
    """A MediaIO of vLLM that decodes what has room in the memory for it."""

    def __init__(self, media_io: Any, share: MediaShare) -> None:
        self._media_io = media_io
        self.share = share
        self.is_image = isinstance(media_io, ImageMediaIO)

    def load_bytes(self, data: bytes) -> Any:
        load = partial(self._media_io.load_bytes, data)
        return self._load(load, [data] if self.is_image else [])

    def load_base64(self, media_type: str, data: str) -> Any:
        if self.is_image:
            return self.load_bytes(_from_base64(data))
        frames: list[str] = []
        if media_type.lower() == "video/jpeg":  # images with commas between them
            most = self._media_io.num_frames
            frames = data.split(",")[: most if most > 0 else None]
        load = partial(self._media_io.load_base64, media_type, data)
        return self._load(load, map(_from_base64, frames))

    def load_file(self, path: Path) -> Any:
        if self.is_image:
            return self.load_bytes(path.read_bytes())
        return self._load(partial(self._media_io.load_file, path), [])

    def _load(self, load: Callable[[], Any], images: Iterable[bytes]) -> Any:
        """images: the files in it, if they are known. Only their headers are read."""
        expected = sum(image_bytes(open_image(BytesIO(image))) for image in images)
        if isinstance(self._media_io, AudioMediaIO):
            expected = envs.VLLM_MAX_AUDIO_DECODE_BYTES
        return self.share.load(expected or UNKNOWN_BYTES, load, _size_of)


def _from_base64(text: str) -> bytes:
    return pybase64.b64decode(text, validate=True)


def image_bytes(image: Any) -> int:
    """Bytes of a Pillow image when it is decoded: Pillow has four for a pixel of RGB."""
    return int(image.width * image.height * 4)


def _size_of(loaded: Any) -> int:
    owner = owner_of(loaded)
    return int(owner.nbytes) if hasattr(owner, "nbytes") else image_bytes(owner)


async def in_thread(load: Callable[[], Any], counted: Counted) -> Any:
    """Decode in a thread of vLLM's pool; audio and video of a request one after the other.

    Nobody knows their size before. So each takes much memory while it is decoded.
    """
    async with nullcontext() if counted.is_image else counted.share.unknown:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(global_thread_pool, decoded, load)


def decoded(load: Callable[[], Any]) -> Any:
    """What `load` returns. Raises VLLMValidationError: what cannot be decoded, the client sent."""
    try:
        return load()
    except (VLLMValidationError, CfgServeError, MemoryError):
        raise
    except ImportError as error:
        logger.warning("An image, audio or video was refused: %s", error)
        raise refused("this server has no package that decodes it.") from error
    except UnidentifiedImageError as error:
        raise refused("it is no image of a known format.") from error
    except Exception as error:  # Pillow's readers raise what they like
        reason = _OBJECT.sub("", str(error)).rstrip(". ")
        raise refused(f"{reason or type(error).__name__}.") from error


def refused(sentence: str) -> VLLMValidationError:
    """The error for an image, audio or video, which a client gets with status 400."""
    return VLLMValidationError(
        f"An image, audio or video cannot be used: {sentence}", parameter="messages"
    )
