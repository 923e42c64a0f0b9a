"""Files of images, audio and video: what their first bytes and headers show."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import time
import zlib
from typing import Any

import pytest
from PIL import Image

from deployments.generator.media.files import (
    MAX_JPEG_SCANS,
    MAX_VIDEO_FRAMES,
    MediaFileError,
    check_file,
    check_video_size,
    data_parts,
    format_of,
)

PIXELS = 50_000_000


def saved(name: str, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(file, name, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


@pytest.mark.parametrize("name", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF"])
def test_images_that_are_read(name: str) -> None:
    assert check_file(saved(name), "image") == name
    assert format_of(saved(name), "audio") in (None, "MP4")  # AVIF is of the family of MP4


@pytest.mark.parametrize(
    "options",
    [{"progressive": True}, {"quality": 95, "subsampling": 0}, {"restart_marker_blocks": 4}],
)
def test_usual_jpegs(options: dict[str, Any]) -> None:
    data = saved("JPEG", (800, 600), **options)
    assert check_file(data, "image") == "JPEG"
    # a film behind the photo, as telephones write it
    assert check_file(data + random.Random(0).randbytes(3 << 20), "image") == "JPEG"


def test_usual_gifs_and_pngs() -> None:
    frames = [Image.new("P", (30, 30), colour) for colour in range(20)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], comment=b"x" * 2000)
    assert check_file(file.getvalue(), "image") == "GIF"
    assert check_file(saved("PNG", (1000, 800)), "image") == "PNG"


@pytest.mark.parametrize("name", ["TIFF", "ICO", "TGA", "DDS", "PPM", "PCX", "JPEG2000", "SGI"])
def test_formats_that_are_not_read(name: str) -> None:
    with pytest.raises(MediaFileError, match="no image of a known format: send PNG, JPEG"):
        check_file(saved(name), "image")


PLAYLISTS = {
    "session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "HLS": b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1/a.ts\n",
    "HLS behind a tag": b"ID3\x04\0\0\0\0\0\x02ab#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1/a.ts\n",
    "concat": b"ffconcat version 1.0\nfile 'http://127.0.0.1/a.mp4'\n",
    "DASH": b'<?xml version="1.0"?><MPD></MPD>',
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"></svg>',
    "text": b"hello",
    "nothing": b"",
    "half a tag": b"ID3\x04\0\0",
    "a tag alone": b"ID3\x04\0\0\x7f\x7f\x7f\x7f",
}


@pytest.mark.parametrize("medium", ["image", "audio", "video"])
@pytest.mark.parametrize("name", list(PLAYLISTS))
def test_files_that_name_other_files(name: str, medium: Any) -> None:
    """FFmpeg opens what they name, and waits at a socket for what a description promises."""
    with pytest.raises(MediaFileError, match=f"no {medium} of a known format"):
        check_file(PLAYLISTS[name], medium)


@pytest.mark.parametrize(
    ("start", "medium", "name"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", "audio", "WAV"),
        (b"fLaC\0\0\0\x22", "audio", "FLAC"),
        (b"OggS\0\x02", "audio", "OGG"),
        (b"\xff\xfb\x90\0", "audio", "MP3"),
        (b"ID3\x04\0\0\0\0\0\x02ab\xff\xfb\x90\0", "audio", "MP3"),
        (b"\0\0\0\x20ftypM4A ", "audio", "MP4"),
        (b"\0\0\0\x20ftypisom", "video", "MP4"),
        (b"\x1aE\xdf\xa3\x01", "video", "WEBM"),
        (b"RIFF\0\0\0\0AVI LIST", "video", "AVI"),
        (b"\x47" + bytes(187) + b"\x47", "video", "MPEG-TS"),
        (b"GIF89a", "video", "GIF"),
    ],
)
def test_sounds_and_films(start: bytes, medium: Any, name: str) -> None:
    assert check_file(start, medium) == name


def many_scans(number: int) -> bytes:
    """A JPEG whose last scan comes again and again. Each costs a pass over the image."""
    data = saved("JPEG", (64, 64), progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * number + data[-2:]


def large_scans(number: int) -> bytes:
    """The same, of an image of 7,000 x 7,000 pixels in its header."""
    data = many_scans(number)
    at = data.index(b"\xff\xc2")
    return data[: at + 5] + struct.pack(">HH", 7000, 7000) + data[at + 9 :]


BOMBS = {
    "chunks of a PNG": (saved("PNG")[:33] + chunk(b"aaAa", b"") * 20_000, "too many parts"),
    "segments of a JPEG": (b"\xff\xd8" + b"\xff\xfe\x00\x02" * 20_000, "too many parts"),
    "no segments": (b"\xff\xd8\xff\xfe\x00\x02" + b"a" * 20_000, "too many parts"),
    "fill bytes": (b"\xff\xd8" + b"\xff" * 20_000, "too many parts"),
    "scans": (many_scans(MAX_JPEG_SCANS), "too many scans"),
    "large scans": (large_scans(25), "too many scans"),
    "blocks of a GIF": (b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01a" * 20_000, "too many parts"),
    "extensions of a GIF": (b"GIF89a" + bytes(7) + b"\x21\xfe\0" * 20_000, "too many parts"),
    "a compressed BMP": (
        b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 7000, 7000, 1, 8, 1) + bytes(20),
        "compressed BMP",
    ),
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_much_work_of_few_bytes(name: str) -> None:
    data, sentence = BOMBS[name]
    with pytest.raises(MediaFileError, match=sentence):
        check_file(data, "image")


def test_headers_are_read_fast_whatever_follows() -> None:
    rng = random.Random(0)
    for start in (saved("PNG")[:40], saved("JPEG")[:400], saved("GIF")[:40], saved("BMP")[:60]):
        for filler in (b"\xff", b"\0", b"\xff\xda\0\x02", b"!", rng.randbytes(997)):
            began = time.perf_counter()
            with contextlib.suppress(MediaFileError):
                check_file(start + filler * (4_000_000 // len(filler)), "image")
            assert time.perf_counter() - began < 1


def test_no_header_is_a_fault_of_ours() -> None:
    rng = random.Random(1)
    for name in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "AVIF"):
        whole = saved(name)
        for _ in range(300):
            data = bytearray(whole[: rng.randint(0, len(whole))])
            for _ in range(rng.randint(0, 4) if data else 0):
                data[rng.randrange(len(data))] = rng.randrange(256)
            for medium in ("image", "audio", "video"):
                with contextlib.suppress(MediaFileError):
                    check_file(bytes(data), medium)


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ((0, 0, 5), "without a picture"),
        ((10_000, 10_000, 1), "10000 x 10000 pixels, and at most 50000000"),
        ((16, 16, MAX_VIDEO_FRAMES + 1), "frames of 16 x 16 pixels"),
        ((16, 16, 2**31), "frames of 16 x 16 pixels"),
        ((3840, 2160, 5000), "5000 frames of 3840 x 2160"),
    ],
)
def test_sizes_of_films(size: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(MediaFileError, match=sentence):
        check_video_size(*size, PIXELS)
    check_video_size(1920, 1080, 4000, PIXELS)
    check_video_size(640, 360, MAX_VIDEO_FRAMES, 0)


def test_data_addresses() -> None:
    assert data_parts("data:image/png;base64,AAAA") == ("image/png", "AAAA")
    assert data_parts("DATA:Video/JPEG;charset=x;base64,AA,BB") == ("video/jpeg", "AA,BB")
    for url in ("data:", "data:image/png,AAAA", "data:image/png;base64", "data:,x"):
        with pytest.raises(MediaFileError, match="its address is not understood"):
            data_parts(url)
