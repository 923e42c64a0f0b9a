"""Guidance in the extra arguments of vLLM's sampling parameters, and what is counted of it."""

from types import SimpleNamespace

import pytest

from cfg_core.errors import GuidanceError
from cfg_core.params import ResolvedFollower, ResolvedGuidance, TokenIds
from deployments.requests.guidance_streams import adapter_of
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
    guidance = ResolvedGuidance.from_extra_args(extra)
    assert (guidance is not None) == bool(lengths)
    followers = guidance.followers if guidance is not None else ()
    assert [one.num_tokens for one in followers] == lengths


@pytest.mark.parametrize(
    ("prompt", "has_adapter", "same"),
    [
        ([1, 2], False, {0, 2}),
        ([1, 2], True, {0}),
        ([2, 1], False, set()),
        ([1], False, set()),
        (None, False, set()),
    ],
)
def test_followers_that_read_the_leaders_own_prompt(prompt, has_adapter, same):
    ids = TokenIds.of((1, 2))
    followers = (
        ResolvedFollower(token_ids=ids),
        ResolvedFollower(token_ids=ids, lora=["b", 2, "/b"]),
        ResolvedFollower(token_ids=ids, lora=False),
        ResolvedFollower(embeds={"shape": [2, 64], "dtype": "float32", "data": b""}),
    )
    guidance = ResolvedGuidance(weights=(2.0, -0.5, -0.25, -0.25, 0.0), followers=followers)
    assert guidance.same_prompts(prompt, has_adapter) == same


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
