"""Files that clients send, through vLLM's readers: what is read, and what would cost too much.

No engine is started.
"""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from cfg_core.errors import CapacityError

FRAMES = 50
KINDS = {"a.mp4": "mp4v", "a.avi": "MJPG", "a.webm": "VP80", "a.mkv": "mp4v"}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import vLLM once, for all tests."""
    import deployments.generator.media.connector  # noqa: F401


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Films of 50 frames of 64 x 48 pixels, each lighter than the one before."""
    folder, films = tmp_path_factory.mktemp("films"), {}
    for name, codec in KINDS.items():
        path = str(folder / name)
        writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*codec), 10, (64, 48))
        for number in range(FRAMES):
            writer.write(np.full((48, 64, 3), 5 * number, np.uint8))
        writer.release()
        films[name] = Path(path).read_bytes()
    return films


def load(data: bytes, kind: str = "image", **options: Any) -> Any:
    """What a replica makes of a file in a data: address."""
    from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

    from deployments.generator.media.connector import CheckedConnector

    media_io = {
        "image": lambda: ImageMediaIO(),
        "audio": lambda: AudioMediaIO(),
        "video": lambda: VideoMediaIO(ImageMediaIO(), **options),
    }[kind]()
    url = f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"
    return asyncio.run(CheckedConnector().load_from_url_async(url, media_io))


def refused(data: bytes, kind: str = "image", **options: Any) -> str:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as error:
        load(data, kind, **options)
    return str(error.value)


def saved(name: str, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(file, name, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF"])
def test_images_whole_and_truncated(name: str) -> None:
    """A client gets a sentence, and no text of Python's."""
    data = saved(name)
    assert load(data).media.size == (40, 30)
    for share in (0.3, 0.6, 0.9):
        told = refused(data[: int(len(data) * share)])
        assert "it is truncated." in told or "its data do not fit its header." in told


def test_an_image_on_its_side() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert load(saved("JPEG", exif=exif)).media.size == (30, 40)


def test_images_within_images() -> None:
    """The header of an icon shows 256 x 256 pixels. The PNG in it had 13,000 x 13,000."""
    png = saved("PNG")
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(png), 22) + png
    assert "no image of a known format: send PNG, JPEG" in refused(icon)


@pytest.mark.parametrize("name", list(KINDS))
def test_films(films: dict[str, bytes], name: str) -> None:
    frames, told = load(films[name], "video", num_frames=8).media
    assert frames.shape == (8, 48, 64, 3)
    assert told["total_num_frames"] == FRAMES
    light = frames.mean((1, 2, 3))
    assert all(np.diff(light) > 10)


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_descriptions_of_sessions_open_no_socket(kind: str) -> None:
    """FFmpeg waited ten seconds at a UDP port for what a text promised."""
    text = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    began = time.monotonic()
    assert f"no {kind} of a known format" in refused(text + b"m=video 5004 RTP/AVP 96\n", kind)
    assert time.monotonic() - began < 2


def test_damaged_films(films: dict[str, bytes]) -> None:
    for name, data in films.items():
        assert "damaged" in refused(data[:60], "video"), name


def test_frames_take_memory_before_they_are_decoded(
    films: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.multimodal.video import VideoBackend

    from deployments.generator.media import memory as media_memory

    defaults = (media_memory.REPLICA, 20 * 3 * 64 * 48, None)
    monkeypatch.setattr(media_memory.MediaShare.__init__, "__defaults__", defaults)
    assert load(films["a.mp4"], "video", num_frames=20).media[0].shape[0] == 20
    monkeypatch.setattr(
        VideoBackend, "read_frames", classmethod(lambda *args, **kw: pytest.fail("decoded"))
    )
    for number in (21, -1):
        with pytest.raises(CapacityError, match="when they are decoded"):
            load(films["a.mp4"], "video", num_frames=number)


def test_films_that_are_too_long(films: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.generator.media import files as media_files
    from deployments.generator.media import videos as media_videos

    with monkeypatch.context() as patch:
        patch.setattr(media_files, "MAX_VIDEO_FRAMES", FRAMES - 1)
        assert "it has 50 frames of 64 x 48 pixels" in refused(films["a.webm"], "video")
    with monkeypatch.context() as patch:
        patch.setattr(media_videos.bounded_loader, "__defaults__", (0.0,))
        assert "to decode: send a shorter" in refused(films["a.webm"], "video")


def test_a_film_that_claims_many_frames(films: dict[str, bytes]) -> None:
    """vLLM tries to read each of them. The count of an AVI is in its header."""
    data = bytearray(films["a.avi"])
    at = data.index(b"strh") + 8 + 32
    struct.pack_into("<I", data, at, 2**30)
    struct.pack_into("<I", data, data.index(b"avih") + 8 + 16, 2**30)
    index = data.rindex(b"idx1")  # what counts the frames that are there
    assert "frames of 64 x 48 pixels" in refused(bytes(data[:index]), "video")
