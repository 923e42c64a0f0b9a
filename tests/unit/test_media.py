"""Images, audio and video in bodies: which are refused, and which addresses are public."""

from __future__ import annotations

from typing import Any

import pytest

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.params import FollowerParams, GuidanceParams
from deployments.requests.guidance_fields import read_guidance
from deployments.requests.media_checks import (
    MAX_MEDIA,
    MAX_MEDIA_OF_CHOICES,
    MEDIA_TOKENS,
    address_of,
    check_media,
    is_public,
    media_parts,
)
from deployments.requests.streams import streams_of

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def test_parts_of_text_are_no_media() -> None:
    told = [{"type": "text", "text": "x"}, {"text": "y"}, "z", IMAGE, {"type": "input_audio"}]
    assert list(media_parts([{"content": told}, {"content": "x"}, 5, {}])) == told[3:]


@pytest.mark.parametrize(
    "part",
    [
        {**IMAGE, "uuid": "a"},
        {"type": "image_url", "image_url": {"url": "data:,", "uuid": "a"}},
        {"type": "input_audio", "input_audio": {"uuid": "a"}},
    ],
)
def test_names_that_other_clients_could_take_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="uuid is not supported") as error:
        check_media("chat", body(part))
    assert error.value.param == "messages"


def test_the_number_is_bounded() -> None:
    check_media("chat", body(*[IMAGE] * MAX_MEDIA))
    with pytest.raises(RequestError, match=f"one may have {MAX_MEDIA}"):
        check_media("chat", body(*[IMAGE] * (MAX_MEDIA + 1)))
    check_media("completion", {"prompt": "x"})


def test_each_choice_has_its_images() -> None:
    check_media("chat", {**body(*[IMAGE] * 4), "n": MAX_MEDIA_OF_CHOICES // 4})
    check_media("chat", {**body(), "n": 10_000})
    check_media("chat", {**body(IMAGE), "n": None})
    with pytest.raises(RequestError, match="ask for fewer choices") as error:
        check_media("chat", {**body(*[IMAGE] * 4), "n": MAX_MEDIA_OF_CHOICES // 4 + 1})
    assert error.value.param == "n"


def test_a_batch_is_bounded_as_one_request() -> None:
    chats = [body(IMAGE)["messages"]] * (MAX_MEDIA + 1)
    check_media("batch", {"messages": chats[1:]})
    with pytest.raises(RequestError, match=f"one may have {MAX_MEDIA}"):
        check_media("batch", {"messages": chats})
    with pytest.raises(RequestError, match="uuid is not supported"):
        check_media("batch", {"messages": [body({**IMAGE, "uuid": "a"})["messages"]]})


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_tools_are_no_media_and_their_answers_may_have_some() -> None:
    """In the Messages API, calls of tools and their answers are parts, too."""
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"uuid": "b", "image_pil": 1}}
    answer = {"type": "tool_result", "tool_use_id": "a", "content": "nothing"}
    check_media("messages", body(*[call, answer] * MAX_MEDIA))
    seen = {**answer, "content": [PNG]}
    assert list(media_parts(body(call, answer, seen, PNG)["messages"])) == [PNG, PNG]
    with pytest.raises(RequestError, match=f"one may have {MAX_MEDIA}"):
        check_media("messages", body(*[seen] * (MAX_MEDIA + 1)))
    told = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}
    assert list(media_parts([told])) == [{"type": "input_image"}]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"image_url": {"url": "data:,"}}, "has no type"),
        ({"type": None, "image_url": {"url": "data:,"}}, "has no type"),
        ({"type": ["image_url"], "image_url": {"url": "data:,"}}, "has no type"),
        ({"type": "text", "uuid": "a", "image_url": {"url": "data:,"}}, "uuid is not supported"),
        ({"type": "image_url", "uuid": 0, "image_url": {"url": "data:,"}}, "uuid is not supported"),
        ({"type": "image_pil", "image_pil": "/etc/passwd"}, "'image_pil' is for Python"),
        ({"type": "image_url", "image_url": "data:,"}, 'send it as "image_url": {"url"'),
        ({"type": "image_url", "image_url": {"url": ""}}, 'send it as "image_url": {"url"'),
        ({"type": "video_url"}, 'send it as "video_url": {"url"'),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "batch", "responses"])
def test_parts_that_could_be_read_in_two_ways(
    endpoint: Any, part: dict[str, Any], sentence: str
) -> None:
    """vLLM guesses the type of some, and gives a text of `image_pil` to whoever opens files."""
    messages = body(part)["messages"]
    field = "input" if endpoint == "responses" else "messages"
    sent = {field: [messages] if endpoint == "batch" else messages}
    with pytest.raises(RequestError, match=sentence) as error:
        check_media(endpoint, sent)
    assert error.value.param == field


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("data:image/png;base64,AA", "data"),
        ("DATA:image/png;base64,AA", "data"),
        ("http://example.org/a.png", "http"),
        ("HTTPS://example.org/a.png", "http"),
        ("file:///etc/passwd", "file"),
    ],
)
def test_kinds_of_addresses(url: str, kind: str) -> None:
    assert address_of(url, []) == kind


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://example.org/a", "gopher://x", "/etc/passwd", "", "http://", "http:///a"),
        *("http://[::1", "http://example.org:port/", "javascript:1", "s3://bucket/key"),
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        address_of(url, [])


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://user:secret@example.org/a.png", "user name or password"),
        ("http://images.local@example.org/", "user name or password"),
        ("http://:@example.org/", "user name or password"),
        ("http://example.org:8265/", "from port 8265: use 80 or 443"),
        ("https://example.org:22/", "from port 22"),
        ("http://example.org/" + "a" * 9000, "has 9019 characters"),
        ("file:///" + "a" * 9000, "has 9008 characters"),
    ],
)
def test_parts_of_addresses_that_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as error:
        address_of(url, [])
    assert "secret" not in str(error.value)
    assert address_of("https://example.org:443/", []) == "http"
    assert address_of("http://example.org:80/", []) == "http"


def test_only_these_hosts_if_some_are_named() -> None:
    assert address_of("http://images.local/a", ["images.local"]) == "http"
    assert address_of("http://images.local:8080/a", ["Images.local"]) == "http"
    for url in ("http://example.org/", "http://images.local.evil.org", "http://images.local./"):
        with pytest.raises(RequestError, match="does not fetch from"):
            address_of(url, ["images.local"])
    assert address_of("data:,", ["images.local"]) == "data"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1"),
        *("64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "fec0::1", "::7f00:1", "::ffff:0:7f00:1"),
    ],
)
def test_private_addresses(host: str) -> None:
    assert not is_public(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(host: str) -> None:
    assert is_public(host)


def test_images_count_in_the_estimate_and_in_the_prefix() -> None:
    def length(*parts: Any) -> int:
        return streams_of("chat", body(*parts), None)[0][0].num_tokens

    text = {"type": "text", "text": "what is it?"}
    assert length(IMAGE, text) >= length(text) + MEDIA_TOKENS
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    prompts = [streams_of("chat", body(i, text), None)[0][0].prompt for i in (IMAGE, IMAGE, other)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_python_objects_are_refused_over_http() -> None:
    with pytest.raises(GuidanceError, match="send negative_messages with image parts"):
        read_guidance({"negative_multi_modal_data": {"image": []}}, "chat")
    streams = [{"weight": -1, "multi_modal_data": {"image": [[0]]}}]
    with pytest.raises(GuidanceError, match=r"send guidance_streams\[0\].messages with image"):
        read_guidance({"guidance_streams": streams}, "chat")


# --- offline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("media", [{}, 5, ["x"], {"image": "a.png"}, {"image": [b"x"]}])
def test_media_must_be_objects_without_addresses(media: Any) -> None:
    with pytest.raises(GuidanceError, match="multi_modal_data"):
        GuidanceParams(scale=2, negative_media=media)
    with pytest.raises(GuidanceError, match="multi_modal_data"):
        FollowerParams(weight=1, multi_modal_data=media)


def test_media_make_a_follower_of_their_own() -> None:
    image = object()
    fields = {"guidance_scale": 2, "negative_multi_modal_data": {"image": image}}
    params = GuidanceParams.from_fields(fields)
    assert params is not None
    assert params.has_negative
    assert params.to_extra_args()["negative_multi_modal_data"] == {"image": image}
    entry = {"weight": -1.0, "multi_modal_data": {"image": [image]}}
    follower = FollowerParams.of(entry, "guidance_streams[0]")
    assert follower.to_entry() == entry
    with pytest.raises(GuidanceError, match="guidance_streams has the weights"):
        GuidanceParams(streams=(follower,), negative_media={"image": image})
