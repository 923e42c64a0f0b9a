"""Images through vLLM's serving classes, as in a replica: guided chats, and what is refused.

The engine has a process of its own. Addresses are fetched from a small server on this machine,
which is private, so it is reached only if its host is named.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import json
import math
import os
import random
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.utils.async_utils import make_async

from cfg_core.errors import (
    CapacityError,
    CfgServeError,
    GuidanceError,
    OverloadedError,
    RequestError,
)
from deployments.generator.media import turns as media_turns
from tests.engine.image_cases import LEAST_GAP
from tests.engine.in_process_server import Server, events
from tests.engine.tiny_vision import STAND_IN, Streams, build_vision, noised, picture, use_stand_in

TOKENS = 12
ASKS = "What is on this picture?"


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def chat(url: str | None, text: str = ASKS) -> list[dict[str, Any]]:
    """A conversation about an image."""
    image = [{"type": "image_url", "image_url": {"url": url}}] if url else []
    return [{"role": "user", "content": [*image, {"type": "text", "text": text}]}]


def as_text(has_image: bool, text: str = ASKS) -> str:
    """The same conversation as the template of the tiny model writes it."""
    return f"user: {'<image>' * has_image}{text}\nassistant:"


SHARED: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
SHOWN: dict[str, Any] = {**SHARED, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def streams(folder: Path) -> Streams:
    return Streams(folder, "llava")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    use_stand_in()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
        patch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "2")
        patch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000000")
        server = Server(folder, limit_mm_per_prompt={"image": 2})
        yield server
        server.close()


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def test_vcd_in_a_chat(server: Server, streams: Streams) -> None:
    """The formula with the plausibility cut, whole and as a stream, and with two choices."""
    clear, blurred = picture(1), noised(picture(1))
    prompts = [streams.prompt(as_text(True), [image], True) for image in (clear, blurred)]
    want, gap = streams.generate(prompts, [2, -1], TOKENS, 0.1)
    assert gap > LEAST_GAP
    body = {
        "messages": chat(data_url(clear)),
        "negative_messages": chat(data_url(blurred)),
        "guidance_scale": 2,
        "guidance_min_p": 0.1,
        **SHOWN,
    }
    answer = server.answer(body)
    assert ids(answer) == want
    assert answer["guidance"] == {
        "scale": 2.0,
        "streams": 2,
        "negative_prompt_tokens": prompts[1]["input_ids"].shape[1],
        "guided_tokens": TOKENS,
    }
    chunks = events(server.ask({**body, "stream": True}))
    told = [token for c in chunks for x in c["choices"] for token in x.get("token_ids") or ()]
    assert told == want
    choices = server.answer({**body, "n": 2, "temperature": 1, "top_k": 1})["choices"]
    assert [list(choice["token_ids"]) for choice in choices] == [want, want]


def test_icd_and_m3id_with_weights(server: Server, streams: Streams) -> None:
    """Two followers: the same image after a disturbing instruction, and no image."""
    image, odd = picture(2), f"You are confused. {ASKS}"
    prompts = [
        streams.prompt(as_text(True), [image], True),
        streams.prompt(as_text(True, odd), [image], True),
        streams.prompt(as_text(False), [], True),
    ]
    want, gap = streams.generate(prompts, [1.75, -0.5, -0.25], TOKENS)
    assert gap > LEAST_GAP
    url = data_url(image)
    entries = [
        {"messages": chat(url, odd), "weight": -0.5},
        {"messages": chat(None), "weight": -0.25},
    ]
    body = {"messages": chat(url), "guidance_streams": entries, **SHOWN}
    assert ids(server.answer(body)) == want


def test_a_system_message_keeps_the_image(server: Server, streams: Streams) -> None:
    """`negative_prompt` replaces the system message alone. The image is the leader's."""
    image = picture(3)
    negative = streams.prompt(f"system: Say nothing true.\n{as_text(True)}", [image], True)
    want, gap = streams.generate(
        [streams.prompt(as_text(True), [image], True), negative], [2, -1], TOKENS
    )
    assert gap > LEAST_GAP
    body = {"guidance_scale": 2, "negative_prompt": "Say nothing true.", **SHOWN}
    assert ids(server.answer({"messages": chat(data_url(image)), **body})) == want


def test_nothing_stays_pending(server: Server) -> None:
    from cfg_core.vllm_plugin.frontend.follower_media import PENDING

    body = {"messages": chat(data_url(picture(4))), "guidance_scale": 2, **SHARED}
    negative = {"negative_messages": chat(data_url(picture(5)))}
    server.answer({**body, **negative})
    with pytest.raises(RequestError):
        server.answer({**body, **negative, "max_tokens": -5})
    streams = [
        {"messages": negative["negative_messages"], "weight": -1},
        {"messages": chat("file:///etc/hostname"), "weight": -1},
    ]
    with pytest.raises(RequestError):
        server.answer({"messages": body["messages"], "guidance_streams": streams, **SHARED})
    assert not PENDING._kept


REFUSED = {
    "file": ("file:///etc/hostname", "file: addresses are not allowed"),
    "loopback": ("http://127.0.0.1/a.png", "private address"),
    "a name for it": ("http://localhost/a.png", "private address"),
    "private": ("http://10.0.0.1/a.png", "private address"),
    "metadata of clouds": ("http://169.254.169.254/latest", "private address"),
    "mapped": ("http://[::ffff:127.0.0.1]/a.png", "private address"),
    "decimal": ("http://2130706433/a.png", "it cannot be fetched"),
    "octal": ("http://0177.0.0.1/a.png", "cannot be used"),
    "port": ("http://127.0.0.1:9/a.png", "from port 9: use 80 or 443"),
    "user": ("http://user:word@127.0.0.1/a.png", "user name or password"),
    "scheme": ("ftp://example.org/a.png", "send a data:, http: or https: address"),
    "no address": ("picture.png", "send a data:, http: or https: address"),
    "bad base64": ("data:image/png;base64,!!", "cannot be used"),
    "no base64": ("data:image/png,abc", "cannot be used"),
    "no data": ("data:image/png;base64", "cannot be used"),
    "no image": ("data:image/png;base64,AAAA", "cannot be used"),
    "too many pixels": (data_url(Image.new("L", (2000, 2000))), "cannot be used"),
    "site-local": ("http://[fec0::1]/a.png", "private address"),
    "IPv4 in IPv6": ("http://[::7f00:1]/a.png", "private address"),
}


@pytest.mark.parametrize("where", ["plain", "leader", "negative"])
@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_addresses(server: Server, name: str, where: str) -> None:
    """In a plain request, and in both streams of a guided one. What is at fault is named."""
    url, sentence = REFUSED[name]
    good = chat(data_url(picture(1)))
    body = {"messages": good if where == "negative" else chat(url), **SHARED}
    if where != "plain":
        negative = chat(url) if where == "negative" else good
        body |= {"guidance_scale": 2, "negative_messages": negative}
    with pytest.raises(RequestError, match=sentence) as error:
        server.answer(body)
    if where == "negative":
        assert error.value.param == "negative_messages"
        assert error.value.message.startswith("negative_messages cannot be used.")


def test_too_many_images_and_names(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
    for parts, sentence in (
        ([part] * 3, "At most 2 image"),
        ([part] * 33, "one may have 32"),
        ([{**part, "uuid": "x"}], "uuid is not supported"),
    ):
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        for body in (
            {"messages": messages},
            {"messages": chat(None), "guidance_scale": 2, "negative_messages": messages},
        ):
            with pytest.raises(RequestError, match=sentence):
                server.answer({**body, **SHARED})


def test_python_names_are_refused(server: Server) -> None:
    with pytest.raises(GuidanceError, match="send negative_messages"):
        server.answer({"messages": chat(None), "negative_multi_modal_data": {"image": "a"}})


REFUSED_LATE: dict[str, dict[str, Any]] = {
    "parameters": {"min_tokens": 300, "max_tokens": None},
    "vLLM's own check of them": {"temperature": 5000, "top_p": 7},
    "no room": {"negative_messages": chat(None, "x" * 240)},
    "the second follower": {
        "guidance_streams": [
            {"messages": chat(None), "weight": -1},
            {"messages": chat("file:///etc/hostname"), "weight": -1},
        ]
    },
}


@pytest.mark.parametrize("name", list(REFUSED_LATE))
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_image_can_be_sent_again(server: Server, name: str, stream: bool) -> None:
    """vLLM believes that what it has rendered is with the engine. A refusal must not mislead it."""
    new = chat(data_url(picture(55 + list(REFUSED_LATE).index(name) + 10 * stream)))
    guidance = {"guidance_scale": 2, "negative_messages": new}
    refused = {**guidance, **SHARED, **REFUSED_LATE[name]}
    if "guidance_streams" in refused:
        refused = {key: refused[key] for key in refused if key not in guidance}
    with pytest.raises(RequestError):
        server.answer({"messages": new, "stream": stream, **refused})
    want = ids(server.answer({"messages": new, **SHOWN}))
    assert ids(server.answer({"messages": new, **guidance, **SHOWN})) == want


READ_ONLY: dict[str, Any] = {
    "tokenize": lambda vllm, model, chat: vllm.small.tokenize({"messages": chat}, {}),
    "render": lambda vllm, model, chat: vllm.small.render(
        "chat", {"model": model, "messages": chat}
    ),
    "count_tokens": lambda vllm, model, chat: vllm.small.count_tokens(
        {"model": model, "messages": as_anthropic(chat)}, {}
    ),
}


def as_anthropic(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for the Messages API."""
    (message,) = messages
    image, text = message["content"]
    data = image["image_url"]["url"].split(",")[1]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return [{"role": "user", "content": [{"type": "image", "source": source}, text]}]


@pytest.mark.parametrize("name", list(READ_ONLY))
def test_what_is_only_read_leaves_the_image_to_the_next(
    server: Server, folder: Path, name: str
) -> None:
    """The engine never sees it. vLLM must not believe that it has."""
    image = data_url(picture(80 + list(READ_ONLY).index(name)))
    server.run(READ_ONLY[name](server.vllm, folder.name, chat(image)))
    want = ids(server.answer({"messages": chat(image), **SHOWN}))
    assert ids(server.answer({"messages": chat(image), **SHOWN})) == want


@pytest.mark.parametrize("name", ["tokenize", "render"])
def test_what_is_only_read_has_the_same_rules(server: Server, folder: Path, name: str) -> None:
    message = chat(data_url(picture(1)))[0]
    message["content"][0]["uuid"] = "x"
    with pytest.raises(RequestError, match="uuid is not supported"):
        server.run(READ_ONLY[name](server.vllm, folder.name, [message]))


def test_an_image_that_the_engine_has_lost(server: Server) -> None:
    """vLLM sends a hash alone. The next try sends the image."""
    new = chat(data_url(picture(95)))
    server.run(server.vllm._state.online_renderer.render_chat(parsed({"messages": new})))
    with pytest.raises(CfgServeError, match="does not have an image"):
        server.answer({"messages": new, **SHARED})
    assert ids(server.answer({"messages": new, **SHOWN}))
    server.assert_idle()


def parsed(body: dict[str, Any]) -> Any:
    from deployments.generator.endpoints import SERVED

    return SERVED["chat"].request.model_validate(body)


def test_images_of_a_batch_that_waits(server: Server) -> None:
    """While a chat of a batch waits for its share, others may send its image."""
    chats = [chat(data_url(picture(number))) for number in range(200, 204)]
    long = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}

    async def together() -> tuple[list[str], list[str]]:
        first = asyncio.ensure_future(server.texts({"messages": chats, **long}, endpoint="batch"))
        for _ in range(5000):
            if len(server.vllm._engine.calls._entries) == len(chats):
                break
            await asyncio.sleep(0.001)
        alone = await server.texts({"messages": chats[3], **SHOWN})
        assert not first.done()
        return await first, alone

    with server.share(1):
        whole, alone = server.run(together())
    assert len(json.loads("".join(whole))["choices"]) == 4
    assert ids(json.loads("".join(alone))) == ids(server.answer({"messages": chats[3], **SHOWN}))
    server.assert_idle()


def test_a_request_that_decodes_too_much(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may be a large image. The limits of one request, and of all together."""
    from deployments.generator.media import memory as media_memory

    large = chat(data_url(Image.new("L", (900, 900))))
    body = {"messages": large, **SHARED}
    with monkeypatch.context() as patch:
        patch.setattr(
            media_memory.MediaShare.__init__, "__defaults__", (media_memory.REPLICA, 1000, None)
        )
        with pytest.raises(CapacityError, match="when they are decoded") as error:
            server.answer(body)
        assert error.value.param == "messages"
        with pytest.raises(GuidanceError, match="negative_messages cannot be used"):
            server.answer({"messages": chat(None), "negative_messages": large, "guidance_scale": 2})
    with monkeypatch.context() as patch:
        none = media_memory.Budget(0)
        patch.setattr(media_memory.MediaShare.__init__, "__defaults__", (none, 2**30, None))
        for stream in (False, True):
            with pytest.raises(OverloadedError, match="send the request again later"):
                server.answer({**body, "stream": stream})
    for _ in range(3):
        server.answer(body)
    gc.collect()
    assert media_memory.REPLICA.take(media_memory.REPLICA_BYTES)
    media_memory.REPLICA.give(media_memory.REPLICA_BYTES)


def both(*numbers: int) -> list[dict[str, Any]]:
    """A conversation about images with these numbers."""
    parts = [part for number in numbers for part in chat(data_url(picture(number)))[0]["content"]]
    images = [part for part in parts if part["type"] == "image_url"]
    return [{"role": "user", "content": [*images, {"type": "text", "text": ASKS}]}]


def test_images_are_prepared_in_pieces(
    server: Server, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of all at once: new, known to the engine, and known by half."""
    monkeypatch.setattr(media_turns, "PIECE_VALUES", 1)
    text = f"user: <image><image>{ASKS}\nassistant:"
    leader, negative = (
        streams.prompt(text, [picture(n) for n in numbers], True)
        for numbers in ((301, 302), (302, 303))
    )
    want, gap = streams.generate([leader, negative], [2, -1], TOKENS)
    assert gap > LEAST_GAP
    body = {"messages": both(301, 302), "negative_messages": both(302, 303), "guidance_scale": 2}
    for _ in range(2):
        assert ids(server.answer({**body, **SHOWN})) == want
    server.run(server.vllm._engine.renderer.clear_mm_cache_async())
    assert ids(server.answer({**body, **SHOWN})) == want
    with pytest.raises(RequestError, match="At most 2 image"):
        server.answer({"messages": both(301, 302, 303), **SHARED})


def test_others_wait_for_one_piece(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client has three requests of two images before another client's request arrives."""
    monkeypatch.setattr(media_turns, "PIECE_VALUES", 1)
    prepare, order = media_turns.MediaTurns._prepare, []

    def slow(self: Any, *args: Any) -> None:
        order.append(args[3]["image"][0])
        time.sleep(0.2)
        prepare(self, *args)

    monkeypatch.setattr(media_turns.MediaTurns, "_prepare", slow)
    turns = server.vllm._engine.renderer._process_multimodal_async
    executor = server.vllm._engine.renderer._mm_executor
    monkeypatch.setattr(turns, "_prepare_async", make_async(turns._prepare, executor=executor))

    async def together() -> tuple[int, int]:
        greedy = [
            asyncio.ensure_future(
                server.texts({"messages": both(n, n + 1), **SHARED}, client="greedy")
            )
            for n in (310, 312, 314)
        ]
        for _ in range(1000):
            if order:
                break
            await asyncio.sleep(0.01)
        await server.texts({"messages": both(316, 317), **SHARED}, client="other")
        finished = sum(one.done() for one in greedy)
        await asyncio.gather(*greedy)
        return finished, len(order)

    finished, pieces = server.run(together())
    assert pieces == 8
    assert finished <= 1
    server.assert_idle()


def test_pieces() -> None:
    size = media_turns.PIECE_VALUES // 4
    assert list(media_turns.cuts([size] * 4)) == []
    assert list(media_turns.cuts([size] * 5)) == [slice(0, 4), slice(4, 5)]
    assert list(media_turns.cuts([9 * size, 0, size])) == [slice(0, 1), slice(1, 3)]
    assert media_turns.num_values(Image.new("RGB", (4, 5))) == 60
    assert media_turns.num_values((np.zeros((2, 3, 4, 3)), {"fps": 1})) == 72
    assert media_turns.num_values({"image_embeds": None}) == 0


def test_an_image_that_the_processor_refuses(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM shows the whole prompt. The client gets the reason alone."""
    from transformers import CLIPImageProcessorPil

    def preprocess(*args: Any, **kwargs: Any) -> None:
        raise ValueError("absolute aspect ratio must be smaller than 200")

    monkeypatch.setattr(CLIPImageProcessorPil, "preprocess", preprocess)
    sentence = "cannot read the images, audio or video of the request: absolute aspect ratio"
    with pytest.raises(RequestError, match=sentence) as error:
        server.answer({"messages": chat(data_url(picture(96))), **SHARED})
    assert "PIL" not in str(error.value)


# --- decoding -------------------------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "AVIF")


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_the_clients_fault(name: str) -> None:
    """Pillow's readers raise errors of many kinds."""
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.media import ImageMediaIO

    from deployments.generator.media.connector import CheckedConnector

    file = io.BytesIO()
    picture(1).save(file, name)
    rng = random.Random(name)
    connector = CheckedConnector()
    for _ in range(300):
        data = bytearray(file.getvalue())
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 1, 4])] = rng.randbytes(rng.choice([0, 1, 4]))
        url = f"data:image/png;base64,{base64.b64encode(bytes(data)).decode()}"
        with contextlib.suppress(VLLMValidationError, CapacityError):
            connector.load_from_url(url, ImageMediaIO())


def test_a_header_of_a_huge_image_is_refused() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.media import ImageMediaIO

    from deployments.generator.media.connector import CheckedConnector

    data = bytearray(png(picture(1)))
    data[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    url = f"data:image/png;base64,{base64.b64encode(bytes(data)).decode()}"
    with pytest.raises(VLLMValidationError, match="pixels: send a smaller one"):
        CheckedConnector().load_from_url(url, ImageMediaIO())


def test_frames_of_a_video_count_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    from deployments.generator.media import memory as media_memory
    from deployments.generator.media.connector import CheckedConnector

    frame = data_url(Image.new("L", (1000, 1000))).split(",")[1]
    video = VideoMediaIO(ImageMediaIO(), num_frames=100)
    monkeypatch.setattr(VideoMediaIO, "load_base64", lambda *args: pytest.fail("it was decoded"))
    url = f"data:video/jpeg;base64,{','.join([frame] * 120)}"
    with media_memory.one_request(), pytest.raises(CapacityError, match="when they are decoded"):
        CheckedConnector().load_from_url(url, video)


def test_many_sounds_are_decoded_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes much memory until its size is known. No server of ours needs to be large."""
    from vllm.multimodal.media import AudioMediaIO

    from deployments.generator.media import memory as media_memory
    from deployments.generator.media.connector import CheckedConnector

    def load_bytes(self: AudioMediaIO, data: bytes) -> tuple[np.ndarray, float]:
        time.sleep(0.01)
        return np.zeros(1000, np.float32), 16000.0

    async def all_of_them() -> list[Any]:
        connector = CheckedConnector()
        files = (b"RIFF\0\0\0\0WAVE" + bytes([i]) for i in range(16))
        urls = [f"data:audio/wav;base64,{base64.b64encode(file).decode()}" for file in files]
        with media_memory.one_request():
            loads = (connector.load_from_url_async(url, AudioMediaIO()) for url in urls)
            return list(await asyncio.gather(*loads))

    monkeypatch.setattr(AudioMediaIO, "load_bytes", load_bytes)
    assert len(asyncio.run(all_of_them())) == 16


# --- fetching -------------------------------------------------------------------------------------


class Site(BaseHTTPRequestHandler):
    """Images, redirects, and answers that are too large or too slow."""

    image = png(picture(1))
    open = most = 0
    lock = threading.Lock()

    def take_turn(self) -> None:
        """Wait a little, and note how many wait at the same time."""
        with Site.lock:
            Site.open += 1
            Site.most = max(Site.most, Site.open)
        time.sleep(0.1)
        with Site.lock:
            Site.open -= 1

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        places = {
            "/moved": "/a.png",
            "/away": f"http://localhost:{port}/a.png",
            "/round": "/round",
            "/file": "file:///etc/hostname",
        }
        compressed = zlib.compress(bytes(2**26)) if self.path == "/bomb" else None
        if self.path == "/slow":
            time.sleep(3)
        if self.path == "/turn":
            self.take_turn()
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send_response(200)
            if compressed is not None:
                self.send_header("Content-Encoding", "deflate")
            self.end_headers()
            if compressed is not None:
                self.wfile.write(compressed)
                return
            size = math.ceil(2**20 / len(self.image)) + 1 if self.path == "/large" else 1
            self.wfile.write(self.image * size)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    web = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_address[1]}"
    web.shutdown()
    web.server_close()


def fetch(url: str, domains: list[str], folder: str = "", limit_mb: int = 1) -> Image.Image:
    import vllm.envs
    from vllm.multimodal.media import ImageMediaIO

    from deployments.generator.media.connector import CheckedConnector
    from deployments.generator.media.downloads import Downloads

    connector = CheckedConnector(allowed_media_domains=domains, allowed_local_media_path=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", str(limit_mb))
        vllm.envs.disable_envs_cache()
        Downloads.of_replica = asyncio.Semaphore(32)
        loaded = asyncio.run(connector.load_from_url_async(url, ImageMediaIO(), fetch_timeout=1))
    image: Image.Image = loaded.media
    return image


@pytest.mark.parametrize("path", ["/a.png", "/moved"])
def test_hosts_that_are_named_may_be_private(site: str, path: str) -> None:
    assert fetch(site + path, ["127.0.0.1"]).size == (28, 28)


def fetch_all(site: str, number: int, slots: int, paths: tuple[str, ...] = ()) -> list[Any]:
    """Fetch so many images, and `paths`, for one request.

    slots: downloads of the replica at a time.
    """
    from vllm.multimodal.media import ImageMediaIO

    from deployments.generator.media import memory as media_memory
    from deployments.generator.media.connector import CheckedConnector
    from deployments.generator.media.downloads import Downloads

    async def together() -> list[Any]:
        connector = CheckedConnector(allowed_media_domains=["127.0.0.1"])
        Downloads.of_replica = asyncio.Semaphore(slots)
        urls = [f"{site}{path}" for path in (*["/turn"] * number, *paths)]
        loads = [
            connector.load_from_url_async(url, ImageMediaIO(), fetch_timeout=5) for url in urls
        ]
        with media_memory.one_request():
            tasks = [asyncio.create_task(load) for load in loads]
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    return asyncio.run(together())


def test_downloads_of_a_request_take_turns(site: str) -> None:
    """Those of one client must leave slots to the others."""
    Site.most = 0
    loaded = fetch_all(site, 12, 32)
    assert [item.media.size for item in loaded] == [(28, 28)] * 12
    assert 1 < Site.most <= 4


def test_too_many_downloads_are_an_overload(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for ever for a slot of the replica."""
    from deployments.generator.media import downloads as media_downloads

    monkeypatch.setattr(media_downloads, "MAX_WAIT_S", 0.02)
    loaded = fetch_all(site, 2, 1)
    assert all(isinstance(item, OverloadedError) and item.reason == "media" for item in loaded)


def test_one_client_has_a_bound_on_downloads_that_wait(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.generator.media import downloads as media_downloads

    monkeypatch.setattr(media_downloads, "CLIENT_WAITING", 0)
    (refused,) = fetch_all(site, 1, 32)
    assert isinstance(refused, OverloadedError)
    assert "Your requests wait for as many" in str(refused)


def test_the_first_failure_ends_the_other_downloads_of_a_request(site: str) -> None:
    """vLLM waits for all of them: eight hosts that send nothing would take four times as long."""
    began = time.monotonic()
    loaded = fetch_all(site, 0, 32, ("/slow", "/slow", "/slow", "/missing", *["/slow"] * 12))
    assert time.monotonic() - began < 2
    assert {str(item) for item in loaded} == {str(loaded[3])}
    assert "answered with status 404" in str(loaded[3])


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/away", "does not fetch from 'localhost'"),
        ("/round", "redirects more than 3 times"),
        ("/file", "redirects to something that is no http"),
        ("/missing", "answered with status 404"),
        ("/bomb", "no image of a known format: send PNG, JPEG"),
        ("/slow", "did not send it within 1 seconds"),
        ("/large", "has more than 1048576 bytes"),
    ],
)
def test_answers_that_are_refused(site: str, path: str, sentence: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=sentence):
        fetch(site + path, ["127.0.0.1"])


def test_the_address_that_is_connected_to_is_checked(site: str) -> None:
    """A name that resolves to a public address first, and to a private one when it is used."""
    import aiohttp
    from vllm.exceptions import VLLMValidationError

    async def rebound(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        port = int(site.rsplit(":", 1)[1])
        own = {"hostname": "x", "host": "127.0.0.1", "port": port, "family": 2, "proto": 6}
        return [{**own, "flags": 0}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiohttp.TCPConnector, "_resolve_host", rebound)
        with pytest.raises(VLLMValidationError, match="private address"):
            fetch("http://images.example.org/a.png", [])


def test_files_of_one_folder_if_it_is_named(tmp_path: Path) -> None:
    from vllm.exceptions import VLLMValidationError

    (tmp_path / "own").mkdir()
    for folder in (tmp_path, tmp_path / "own"):
        picture(1).save(folder / "a.png")
    own = str(tmp_path / "own")
    assert fetch(f"file://{own}/a.png", [], own).size == (28, 28)
    for path in (f"{tmp_path}/a.png", f"{own}/../a.png", f"{own}/b.png", own):
        with pytest.raises(VLLMValidationError, match="no such file for clients") as error:
            fetch(f"file://{path}", [], own)
        assert own not in str(error.value)
