"""Decodes videos with vLLM's loaders, after their headers were read, and for a bounded time.

A loader passes over all frames of a video, and makes one array of those that it samples. How many
these are depends on the model, so the memory for them is taken when the loader has chosen them.
Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import cv2
import vllm.envs as envs
from typing_extensions import override
from vllm.multimodal.media import VideoMediaIO
from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

from deployments.generator.media.files import MediaFileError, check_video_size
from deployments.generator.media.memory import MediaShare

VIDEO_SECONDS = 30.0
"""Seconds for which a video is decoded."""


class VideoSize(NamedTuple):
    """Pixels of a frame, and the number of all frames, as the header has them."""

    width: int
    height: int
    frames: int


def load_video(media_io: VideoMediaIO, data: bytes, share: MediaShare) -> Any:
    """What `media_io` makes of a video.

    Raises MediaFileError for too many frames or pixels, or too much work, and errors of memory as
    MediaShare.reserved.
    """
    size = size_of(data)
    check_video_size(*size, envs.VLLM_MAX_IMAGE_PIXELS)
    copies = 2 if media_io.kwargs.get("frame_recovery") else 1
    with ExitStack() as stack:

        def take(frames: int) -> None:
            stack.enter_context(share.reserved(copies * 3 * frames * size.width * size.height))

        bounded = copy.copy(media_io)
        bounded.video_loader = bounded_loader(media_io.video_loader, take)
        return bounded.load_bytes(data)


def size_of(data: bytes) -> VideoSize:
    """What the header of a video shows. Raises MediaFileError if it cannot be read."""
    try:
        capture = OpenCVVideoBackendMixin.open_video_capture(data)
    except (ValueError, cv2.error):
        raise MediaFileError("it is damaged, or a video of a kind that is not read.") from None
    return VideoSize(
        int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)),
        int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)),
        int(capture.get(cv2.CAP_PROP_FRAME_COUNT)),
    )  # OpenCV 5.0 kills the process at `capture.release()`, but not where the capture is deleted


def bounded_loader(loader: Any, take: Callable[[int], None], seconds: float = VIDEO_SECONDS) -> Any:
    """A loader as the given one that asks for its memory, and stops after some seconds.

    take: called once with the number of frames that will be in memory.
    """
    asked: list[int] = []

    class BoundedLoader(type(loader)):  # type: ignore[misc]
        @classmethod
        @override
        def compute_frames_index_to_sample(cls, source: Any, target: Any, **kwargs: Any) -> Any:
            frames = super().compute_frames_index_to_sample(source, target, **kwargs)
            if not asked:
                asked.append(len(frames))
                take(len(frames))
            return frames

        @classmethod
        @override
        def read_frames(cls, cap: Any, *args: Any, **kwargs: Any) -> Any:
            return super().read_frames(TimedCapture(cap, seconds), *args, **kwargs)

    return BoundedLoader()


class TimedCapture:
    """A capture of OpenCV that gives no frames after some seconds: it raises MediaFileError."""

    def __init__(self, capture: Any, seconds: float) -> None:
        self._capture, self._seconds = capture, seconds
        self._end = time.monotonic() + seconds

    def grab(self) -> bool:
        if time.monotonic() > self._end:
            raise MediaFileError(
                f"it takes more than {self._seconds:.0f} seconds to decode: send a shorter or"
                " smaller one."
            )
        return bool(self._capture.grab())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)
