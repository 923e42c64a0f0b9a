"""Files of images, audio and video: which are read, and what their headers show of their cost.

Decoders guess the format of a file. Some formats make them open sockets or other files (playlists,
session descriptions), some are decoded by Python code that holds the interpreter for a minute, and
some make much work of few bytes. So the format is decided here, by the first bytes, and what is
costly is refused before a decoder sees it. Pure: nothing is decoded here.

Each walk over the parts of a file is bounded in steps, because it runs in Python.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Literal

Medium = Literal["image", "audio", "video"]

FORMATS: dict[Medium, str] = {
    "image": "PNG, JPEG, WebP, GIF, BMP or AVIF",
    "audio": "WAV, FLAC, OGG, MP3, AAC, M4A, WebM, AIFF or AMR",
    "video": "MP4, MOV, WebM, MKV, AVI, MPEG, FLV, OGG or GIF",
}
"""What is read, in words."""

MAX_JPEG_SCANS = 100
"""Maximum number of scans of a JPEG. Each is a pass over the whole image. Usual are 1 to 12."""

MAX_JPEG_WORK = 10**9
"""Maximum number of scans times pixels of a JPEG. 20 scans of 50 million pixels."""

MAX_VIDEO_FRAMES = 20_000
"""Maximum number of frames of a video, those included that are not sampled: 11 min of 30 a second.

A reader passes over all of them.
"""

MAX_VIDEO_PIXELS = 10**10
"""Maximum number of pixels in all frames of a video. 2.7 minutes of 1920 x 1080, 30 a second."""

_FEWEST_PARTS = 10_000
_PART_BYTES = 4096
"""A file may have 10,000 parts, and one more for each 4 KiB. Encoders write 8 KiB or more."""

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker of a JPEG that ends a scan's data. Restarts, and 0xFF as data, do not."""

_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of JPEG segments that have the image's height and width."""


class MediaFileError(ValueError):
    """A file that is not read. Its text is a sentence for the client."""


def check_file(data: bytes, medium: Medium) -> str:
    """Return the format of a file, as Pillow names it for images.

    Raises MediaFileError if it is none that is read, or if its headers show that it is costly.
    """
    name = format_of(data, medium)
    if name is None:
        raise MediaFileError(f"it is no {medium} of a known format: send {FORMATS[medium]}.")
    if name in _CHECKS:
        _CHECKS[name](data)
    return name


def _patterns(*signatures: tuple[str, bytes]) -> tuple[tuple[str, re.Pattern[bytes]], ...]:
    return tuple((name, re.compile(start, re.DOTALL)) for name, start in signatures)


_SIGNATURES = {
    "image": _patterns(
        ("PNG", rb"\x89PNG\r\n\x1a\n"),
        ("JPEG", rb"\xff\xd8\xff"),
        ("GIF", rb"GIF8[79]a"),
        ("BMP", rb"BM"),
        ("WEBP", rb"RIFF.{4}WEBP"),
        ("AVIF", rb".{4}ftyp(avi[fs]|.{8,52}avif)"),
    ),
    "audio": _patterns(
        ("WAV", rb"(RIFF|RF64).{4}WAVE"),
        ("AIFF", rb"FORM.{4}AIF[FC]"),
        ("MP4", rb".{4}ftyp"),
        ("OGG", rb"OggS"),
        ("WEBM", rb"\x1aE\xdf\xa3"),
        ("AMR", rb"#!AM"),
    ),
    "video": _patterns(
        ("MP4", rb".{4}(ftyp|moov|mdat|wide|free|skip)"),
        ("AVI", rb"RIFF.{4}AVI "),
        ("GIF", rb"GIF8[79]a"),
        ("MPEG-TS", rb"G(.{187}G|.{0,187}\Z)"),
        ("WEBM", rb"\x1aE\xdf\xa3"),
        ("MPEG", rb"\0\0\x01[\xba\xb3]"),
        ("FLV", rb"FLV\x01"),
        ("OGG", rb"OggS"),
    ),
}
"""How files of each format begin."""

_AFTER_ID3 = _patterns(("MP3", rb"\xff[\xe0-\xff]"), ("FLAC", rb"fLaC"))
"""A reader skips an ID3 tag, and then guesses the format of what follows it."""


def format_of(data: bytes, medium: Medium) -> str | None:
    """The name of the format that the first bytes of a file show. None: none that is read."""
    for name, start in _SIGNATURES[medium]:
        if start.match(data):
            return name
    for name, start in _AFTER_ID3 if medium == "audio" else ():
        if start.match(data, _after_id3(data)):
            return name
    return None


def _after_id3(data: bytes) -> int:
    """The position behind an ID3 tag at the start of a file."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


# --- parts of images ------------------------------------------------------------------------------


class _Parts:
    """Counts the parts of a file. Raises MediaFileError if there are too many."""

    def __init__(self, data: bytes) -> None:
        self._left = _FEWEST_PARTS + len(data) // _PART_BYTES

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise MediaFileError("it has too many parts: save it again with another program.")


def _check_png(data: bytes) -> None:
    parts, at = _Parts(data), 8
    while at + 8 <= len(data):
        parts.count()
        (size,) = struct.unpack_from(">I", data, at)
        if data[at + 4 : at + 8] == b"IEND":
            return
        at += 12 + size


def _check_gif(data: bytes) -> None:
    """Count the parts before the first frame, which is the only one that is decoded."""
    if len(data) < 13:
        return
    parts = _Parts(data)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while at < len(data) and data[at] not in b",;":
        parts.count()
        if data[at] != 0x21:
            at += 1
            continue
        at += 2  # an extension, and its kind
        while at < len(data) and data[at]:
            parts.count()
            at += 1 + data[at]
        at += 1


def _check_bmp(data: bytes) -> None:
    """Refuse compression, which Pillow decodes in Python."""
    if len(data) < 34 or struct.unpack_from("<I", data, 14)[0] < 40:
        return  # an old header, without a field for it
    if struct.unpack_from("<I", data, 30)[0] not in (0, 3, 6):
        raise MediaFileError("it is a compressed BMP: send a PNG.")


def _check_jpeg(data: bytes) -> None:
    scans, pixels = 0, 0
    for marker, at in _segments(data):
        if marker in _SIZES and at + 7 <= len(data):
            height, width = struct.unpack_from(">HH", data, at + 3)
            pixels = max(pixels, height * width)
        scans += marker == 0xDA
        if scans > MAX_JPEG_SCANS or scans * pixels > MAX_JPEG_WORK:
            raise MediaFileError(
                "it is a JPEG of too many scans: save it again, not as a progressive one."
            )


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Markers of a JPEG with the positions behind them, to the end of its first image."""
    parts, at = _Parts(data), 2
    while at + 3 < len(data):
        parts.count()
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at += 1  # Pillow skips what is no marker byte by byte, too
            continue
        marker = data[at + 1]
        if marker == 0xD9:
            return
        yield marker, at + 2
        if 0xD0 <= marker <= 0xD8 or marker == 0x01:
            at += 2  # without a length
            continue
        at += 2 + max(2, struct.unpack_from(">H", data, at + 2)[0])
        if marker == 0xDA:
            found = _MARKER.search(data, at)
            at = found.start() if found else len(data)


_CHECKS: dict[str, Callable[[bytes], None]] = {
    "PNG": _check_png,
    "JPEG": _check_jpeg,
    "GIF": _check_gif,
    "BMP": _check_bmp,
}


# --- videos ---------------------------------------------------------------------------------------


def check_video_size(width: int, height: int, frames: int, max_pixels: int) -> None:
    """Raise MediaFileError for a video whose headers show too many frames or pixels.

    width, height: of a frame. frames: of the whole video. max_pixels: of one frame; 0: no limit.
    """
    if width <= 0 or height <= 0:
        raise MediaFileError("it is a video without a picture.")
    if max_pixels and width * height > max_pixels:
        raise MediaFileError(
            f"its frames have {width} x {height} pixels, and at most {max_pixels} are read: send"
            " smaller ones."
        )
    if frames > MAX_VIDEO_FRAMES or frames * width * height > MAX_VIDEO_PIXELS:
        raise MediaFileError(
            f"it has {frames} frames of {width} x {height} pixels, and at most"
            f" {MAX_VIDEO_FRAMES} frames with {MAX_VIDEO_PIXELS} pixels together are read: send a"
            " shorter or smaller one."
        )


# --- data: addresses ------------------------------------------------------------------------------


def data_parts(url: str) -> tuple[str, str]:
    """The media type of a `data:` address, and its base64. Raises MediaFileError."""
    head, comma, text = url[5:].partition(",")
    kind, _, encoding = head.rpartition(";")
    if not comma or encoding != "base64":
        raise MediaFileError(
            "its address is not understood: send data:TYPE;base64,DATA with the base64 of the file."
        )
    return kind.partition(";")[0].lower(), text
