"""Guidance in the extra arguments of vLLM's sampling parameters, and what is counted of it."""

from types import SimpleNamespace

import pytest

from cfg_core.errors import GuidanceError
from cfg_core.params import ResolvedFollower, ResolvedGuidance, TokenIds
from deployments.requests.extra_args import adapter_of, follower_lengths
from deployments.requests.usage import Meter

PAIR = ResolvedGuidance(
    weights=(2.0, -1.0), followers=(ResolvedFollower(token_ids=TokenIds.of((1, 2))),)
)
STREAMS = ResolvedGuidance(
    weights=(0.0, -0.5, 1.5),
    followers=(
        ResolvedFollower(token_ids=TokenIds.of((1, 2)), lora=["b", 2, "/b"]),
        ResolvedFollower(embeds={"shape": [5, 64], "dtype": "float32", "data": b""}, lora=False),
    ),
)


ADAPTERS = {
    name: SimpleNamespace(lora_name=name, lora_int_id=i, lora_path=f"/{name}")
    for i, name in enumerate("ba", 1)
}


@pytest.mark.parametrize(
    ("name", "found"),
    [(None, None), (False, False), ("a", ["a", 2, "/a"]), ("b", ["b", 1, "/b"]), ("base", False)],
)
def test_adapters_by_name(name, found):
    assert adapter_of(name, "here", ADAPTERS, lambda name: name == "base") == found


@pytest.mark.parametrize(("adapters", "known"), [(ADAPTERS, "a, b"), ({}, "none")])
def test_an_unknown_adapter_is_refused(adapters, known):
    with pytest.raises(GuidanceError) as refusal:
        adapter_of("c", "guidance_streams[1]", adapters, lambda _: False)
    assert refusal.value.param == "guidance_streams[1].lora"
    assert str(refusal.value) == (
        f"guidance_streams[1].lora is not the name of an adapter. Known: {known}; false is the base"
        " model."
    )


@pytest.mark.parametrize(
    ("extra", "lengths"),
    [
        (None, []),
        ({}, []),
        ({"logits_processors": []}, []),
        ({"guidance_scale": 1}, []),
        (PAIR.to_extra_args(), [2]),
        (STREAMS.to_extra_args(), [2, 5]),
    ],
)
def test_the_followers_of_an_admitted_request(extra, lengths):
    assert follower_lengths(extra) == lengths


def test_only_guided_tokens_count_for_all_streams():
    meter = Meter()
    meter.add_output(3, 0, 1)
    assert meter.output_tokens == 3
    meter.add_output(4, 4, 2)
    assert meter.output_tokens == 3 + 8
    meter.add_output(5, 2, 4)  # a window ended after the second token
    assert meter.output_tokens == 3 + 8 + 5 + 2 * 3
    assert meter.guided_tokens == 4 + 2
    assert meter.usage.output_tokens == meter.output_tokens
