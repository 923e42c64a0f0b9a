"""Guidance in the extra arguments of vLLM's sampling parameters, and what is counted of it."""

from types import SimpleNamespace

import pytest

from cfg_core.errors import GuidanceError
from cfg_core.params import FollowerParams, GuidanceParams
from deployments.requests.extra_args import adapter_of, as_xargs, follower_lengths
from deployments.requests.usage import Meter

PAIR = GuidanceParams(scale=2.0, negative_prompt_token_ids=(1, 2))
SCHEDULE = GuidanceParams(schedule=((0, 3.0), (8, 1.0)), negative_prompt_token_ids=(1, 2, 3))
STREAMS = GuidanceParams(
    streams=(
        FollowerParams(weight=-0.5, token_ids=(1, 2), lora=["b", 2, "/b"]),
        FollowerParams(weight=1.5, token_ids=(3,), lora=False),
    ),
    start=2,
    end=9,
    top_k=5,
    min_p=0.25,
    filter_top_k=3,
    logprobs=True,
)
LEADERS_PROMPT = GuidanceParams(streams=(FollowerParams(weight=-1, lora=False),))
ALL = [PAIR, SCHEDULE, STREAMS, LEADERS_PROMPT]


@pytest.mark.parametrize("params", ALL)
def test_guidance_survives_the_way_to_the_engine(params):
    assert GuidanceParams.from_fields(as_xargs(params)) == params


@pytest.mark.parametrize("params", ALL)
def test_xargs_are_what_vllm_takes(params):
    """Text, numbers, and flat lists of them."""
    for value in as_xargs(params).values():
        for item in value if isinstance(value, list) else [value]:
            assert isinstance(item, str | int | float)


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
        (PAIR.to_extra_args(), [2]),
        (SCHEDULE.to_extra_args(), [3]),
        (STREAMS.to_extra_args(), [2, 1]),
        ({"guidance_scale": 2, "negative_prompt_embeds": {"shape": [7, 64]}}, [7]),
        ({"guidance_streams": [{"weight": 1, "prompt_embeds": {"shape": [5, 64]}}]}, [5]),
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
