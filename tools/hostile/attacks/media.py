"""Attacks by images: their addresses, the hosts that they are fetched from, and their files.

They need a server whose model reads images. The hosts that redirect, wait and lie are here: a
server on this machine, whose address the configuration of the stage allows.
"""

from __future__ import annotations

import asyncio
import base64
import random
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tools.hostile.attempt import Attempt, attack

CHAT = "/v1/chat/completions"
MB = 10**6
SLOW_S = 20.0
LARGE = 7_000
"""Width and height of an image that is just allowed: 49 of 50 million pixels."""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, extra: bytes = b"", seed: int | None = None) -> bytes:
    """Return a PNG: black, or of random grey pixels, which do not get smaller."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    if seed is None:
        rows = zlib.compressobj(9)
        data = b"".join(rows.compress(bytes(1 + width)) for _ in range(height)) + rows.flush()
    else:
        pixels = random.Random(seed).randbytes(width * height)
        lines = (b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
        data = zlib.compress(b"".join(lines), 0)
    whole = chunk(b"IHDR", head) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + whole


def address(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat about images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": "What?"}]
    shared = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}], **shared, **fields}


def guided(url: str) -> dict[str, Any]:
    """Return a chat whose negative has the image."""
    return chat(address(png(28, 28)), guidance_scale=2, negative_messages=chat(url)["messages"])


# --- addresses ------------------------------------------------------------------------------------

PRIVATE = (
    *("http://localhost/", "http://0.0.0.0/", "http://2130706433/", "http://0x7f000001/"),
    *("http://0177.0.0.1/", "http://127.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/"),
    *("http://[::ffff:7f00:1]/", "http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/"),
    *("http://[fe80::1]/", "http://[64:ff9b::7f00:1]/", "http://user:word@localhost/"),
    *("http://127.0.0.1@localhost/", "http://localhost#@127.0.0.1/", "http://127.0.0.1.nip.io/"),
    *("http://localhost:6379/", "http:/localhost/", "http://\\localhost/", "http://①②⑦.0.0.1/"),
    *("file:///etc/passwd", "FILE:///etc/passwd", "file://localhost/etc/passwd", "ftp://x/a.png"),
    *("gopher://localhost/", "unix:///tmp/x", "data:text/html,<b>", "data:;base64", "data:,"),
    *("//localhost/a.png", "/etc/passwd", "javascript:1", "blob:x", "http://", "s3://a/b"),
    *("http://" + "a" * 3 * MB, "file:///" + "a" * 3 * MB, "http://localhost/" + "%41" * MB),
)


@attack(0, sees=True)
async def media_addresses(attempt: Attempt) -> None:
    """Send images with addresses of private hosts, files, other schemes, and of 3 MB.

    They are sent in plain requests and in the negative of guided ones. Each must get 400 with a
    sentence, and none may reach a host here.
    """
    async with host(attempt) as (_, hits):
        for url in PRIVATE:
            for body in (chat(url), guided(url)):
                await attempt.expect(f"image at {url[:40]}", CHAT, body, 400)
        if hits:
            attempt.fault(f"hosts were reached: {hits[:3]}")


# --- hosts ----------------------------------------------------------------------------------------

Writer = asyncio.StreamWriter


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def moved(place: str) -> bytes:
    return answer(b"", f"Location: {place}", "Content-Length: 0", status="302 Found")


def answers(port: int) -> dict[str, bytes]:
    """Return what the host here answers at once, by path."""
    image = png(28, 28)
    return {
        "/good": answer(image),
        "/to-localhost": moved(f"http://localhost:{port}/private"),
        "/to-decimal": moved(f"http://2130706433:{port}/private"),
        "/to-user": moved(f"http://127.0.0.1@localhost:{port}/private"),
        "/to-metadata": moved("http://169.254.169.254/latest/meta-data/"),
        "/to-file": moved("file:///etc/passwd"),
        "/to-data": moved(address(image)),
        "/to-other-scheme": moved("gopher://127.0.0.1/"),
        "/to-long": moved("http://127.0.0.1/" + "a" * 100_000),
        "/to-itself": moved("/to-itself"),
        "/to-nowhere": answer(b"", "Content-Length: 0", status="302 Found"),
        "/short": answer(image, "Content-Length: 100000"),
        "/long": answer(image + bytes(100), f"Content-Length: {len(image) - 20}"),
        "/two-lengths": answer(image, "Content-Length: 5", "Content-Length: 9"),
        "/negative-length": answer(image, "Content-Length: -5"),
        "/bomb": answer(zlib.compress(bytes(64 * MB)), "Content-Encoding: deflate"),
        "/chunks": answer(b"ffffffffffffffff\r\n", "Transfer-Encoding: chunked"),
        "/many-headers": answer(image, *(f"X-{n}: {n}" for n in range(100_000))),
        "/long-header": answer(image, "X-A: " + "a" * 5 * MB),
        "/no-http": b"\xff" * 10_000,
        "/nothing": b"",
        "/page": answer(b"<html></html>"),
        "/missing": answer(b"", status="404 Not Found"),
    }


WITH_AN_IMAGE = {"/good", "/long"}
"""Paths that may be answered with 200."""

LATE = ("/slow", "/endless", "/drip", "/silent")


@asynccontextmanager
async def host(attempt: Attempt) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a host of images. Yields its URL, and the list of the private paths that were asked."""
    hits: list[str] = []
    waiting: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        waiting.add(task)
        try:
            path = (await reader.readuntil(b"\r\n")).split()[1].decode()
            if path == "/private":
                hits.append(path)
            await reply(path, writer)
        except (OSError, EOFError, LookupError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the server has had enough of it, or the attack is over
        finally:
            waiting.discard(task)
            writer.close()

    async def reply(path: str, writer: Writer) -> None:
        if path not in LATE:
            writer.write(ready.get(path, answer(b"", status="404 Not Found")))
            await writer.drain()
            return
        if path == "/silent":
            await asyncio.sleep(SLOW_S)
            return
        writer.write(answer(b""))
        for _ in range(400 if path == "/endless" else 100):
            writer.write(bytes(MB) if path == "/endless" else b"\x89")
            await writer.drain()
            if path != "/endless":
                await asyncio.sleep(SLOW_S / 100)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ready = answers(port)
    try:
        yield f"http://127.0.0.1:{port}", hits
    finally:
        server.close()
        for task in waiting:
            task.cancel()


@attack(0, sees=True, limit_s=180)
async def media_hosts(attempt: Attempt) -> None:
    """Fetch images from hosts that redirect, lie about lengths, send bombs, wait, and never end.

    A good image must get 200, all others 400, within 10 s. No redirect may reach another host.
    """
    async with host(attempt) as (url, hits):
        await attempt.expect("a good host", CHAT, chat(f"{url}/good"), 200)
        for path in (*answers(0), *LATE):
            allowed = (200, 400) if path in WITH_AN_IMAGE else (400,)
            reply = await attempt.expect(path, CHAT, chat(url + path), *allowed)
            if reply.seconds > 10:
                attempt.fault(f"{path} took {reply.seconds:.0f} s")
            await attempt.expect(f"negative at {path}", CHAT, guided(url + path), *allowed)
        if hits:
            attempt.fault(f"hosts were reached: {hits[:3]}")


@attack(0, sees=True)
async def media_slow_hosts(attempt: Attempt) -> None:
    """Send 60 requests at once, each with 8 images of hosts that send nothing.

    Each must get 400 or 429.
    """
    async with host(attempt) as (url, _):

        async def one(number: int) -> None:
            urls = [f"{url}{LATE[(number + at) % 4]}" for at in range(8)]
            await attempt.expect("slow hosts", CHAT, chat(*urls), 400, 429, limit_s=80)

        await attempt.together(60, one)


# --- files ----------------------------------------------------------------------------------------


def bitmap(width: int, height: int, compression: int, data: bytes) -> bytes:
    head = struct.pack("<IHHI", 54 + 1024 + len(data), 0, 0, 54 + 1024)
    head += struct.pack("<IiiHHII", 40, width, height, 1, 8, compression, len(data))
    return b"BM" + head + struct.pack("<iiII", 0, 0, 256, 0) + bytes(1024) + data


def tiff(width: int, tile: int) -> bytes:
    """Return a TIFF of one large tile, which is almost empty."""
    data = zlib.compress(bytes(1000))
    tags = [(256, width), (257, width), (258, 8), (259, 8), (262, 1), (277, 1)]
    tags += [(322, tile), (323, tile), (324, 8 + 2 + 12 * 10 + 4), (325, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def jpeg_scans(number: int) -> bytes:
    """Return a progressive JPEG of 49 million pixels with empty scans, of 20 bytes each."""
    table = b"\xff\xc4" + struct.pack(">HB", 20, 0) + bytes([1, *[0] * 15]) + b"\0"
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, LARGE, LARGE, 1) + b"\x01\x11\0"
    quant = b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64)
    scan = b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\x01\0\0\0\0" + b"\0" * 8
    return b"\xff\xd8" + quant + frame + table + scan * number + b"\xff\xd9"


def icon(width: int) -> bytes:
    inner = png(width, width)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(inner), 22) + inner


FILES: dict[str, Callable[[], bytes]] = {
    "PNG of 3,600 million pixels": lambda: png(28, 28).replace(
        struct.pack(">II", 28, 28), struct.pack(">II", 60_000, 60_000), 1
    ),
    "PNG of 81 million pixels": lambda: png(9_000, 9_000),
    "PNG of 300,000 chunks": lambda: png(28, 28, chunk(b"aaAa", b"") * 300_000),
    "PNG, truncated": lambda: png(300, 300, seed=1)[:5000],
    "JPEG of 100,000 scans": lambda: jpeg_scans(100_000),
    "JPEG of a million segments": lambda: b"\xff\xd8" + b"\xff\xfe\x00\x02" * MB,
    "JPEG of no segments": lambda: b"\xff\xd8\xff\xfe\x00\x02" + b"a" * 4 * MB,
    "GIF of many blocks": lambda: b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01a" * 2 * MB,
    "GIF of a large frame": lambda: (
        b"GIF89a\x01\0\x01\0\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02\x44\x01\0;"
    ),
    "WebP of a large canvas": lambda: (
        b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0" + (16383).to_bytes(3, "little") * 2
    ),
    "BMP, compressed": lambda: bitmap(LARGE, LARGE, 1, (b"\xff\0" * 28 + b"\0\0") * LARGE),
    "BMP of a large header": lambda: bitmap(2**31 - 1, 2**31 - 1, 0, b""),
    "TIFF of a large tile": lambda: tiff(16, 30_000),
    "icon of a large PNG": lambda: icon(13_000),
    "QOI": lambda: b"qoif" + struct.pack(">IIBB", 5000, 1000, 3, 0) + b"\x01" * 5 * MB,
    "DDS": lambda: (
        b"DDS " + struct.pack("<7I", 124, 0x1007, LARGE, LARGE, 0, 0, 0) + bytes(44 + 4 * MB)
    ),
    "PPM in words": lambda: b"P3\n2000 2000\n255\n" + b"1 " * 3 * MB,
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/>',
    "playlist": lambda: b"#EXTM3U\n#EXTINF:10,\nhttp://localhost/a.ts\n",
    "session description": lambda: b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
}


@attack(0, sees=True, limit_s=180)
async def media_files(attempt: Attempt) -> None:
    """Send small files that are large images, cost a decoder much, or are damaged.

    Each must get 400, within 3 s. The sentences must have no text of Python's.
    """
    for name, made in FILES.items():
        url = address(made())
        for body in (chat(url), guided(url)):
            reply = await attempt.expect(name, CHAT, body, 400)
            if reply.seconds > 3:
                attempt.fault(f"{name} took {reply.seconds:.0f} s")
            if any(word in reply.text for word in ("object at", "BytesIO", "VLLM_", "Traceback")):
                attempt.fault(f"{name}: {reply.text[:100]}")


@attack(0, sees=True, limit_s=300)
async def media_large_images(attempt: Attempt) -> None:
    """Send 40 requests at once, each with 3 images of 49 million pixels, of 50 kB each.

    Half of them are guided, and some have 32 choices. Each must get 200, 400 or 429.
    """
    url = address(png(LARGE, LARGE))

    async def one(number: int) -> None:
        fields: dict[str, Any] = {"n": 32, "temperature": 1} if number % 4 == 0 else {}
        if number % 2:
            fields = {"guidance_scale": 2, "negative_prompt": "Say nothing."}
        body = chat(url, url, url, **fields)
        await attempt.expect("large images", CHAT, body, 200, 400, 429, limit_s=200)

    await attempt.together(40, one)


def hundred_megabytes() -> list[str]:
    return [address(png(3_200, 3_125, seed=number)) for number in range(10)]


@attack(0, sees=True, limit_s=150)
async def images_of_100_megabytes(attempt: Attempt) -> None:
    """Send one request with 10 images of 10 MB each, which must get 200."""
    reply = await attempt.expect("plain", CHAT, chat(*hundred_megabytes()), 200, limit_s=120)
    print(f"  plain: {1000 * reply.seconds:.0f} ms", flush=True)


@attack(0, sees=True, limit_s=150)
async def guided_images_of_100_megabytes(attempt: Attempt) -> None:
    """Send one guided request with 10 images of 10 MB each, which must get 200.

    Both streams have them.
    """
    body = chat(*hundred_megabytes(), guidance_scale=2, negative_prompt="Say nothing.")
    reply = await attempt.expect("guided", CHAT, body, 200, limit_s=120)
    print(f"  guided: {1000 * reply.seconds:.0f} ms", flush=True)
