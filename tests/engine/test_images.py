"""Images in leaders and followers: guided text equals the formula on transformers' logits.

One engine for each model (image_cases.py), in which everything fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engines import ROOMY, Engine, plain
from tests.engine.image_cases import Bench, bench_of, cases_of, guided, run
from tests.engine.tiny_vision import PLACES, Streams, noised, picture


@pytest.fixture(scope="module", params=sorted(PLACES))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    name: str = request.param
    return bench_of(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def roomy(bench: Bench) -> Iterator[Engine]:
    engine = Engine(bench.folder, **ROOMY)
    yield engine
    engine.close()


@pytest.mark.parametrize("label", list(cases_of("")))
def test_alone(roomy: Engine, bench: Bench, label: str) -> None:
    case = bench.cases[label]
    (output,) = run(roomy, [case.prompt], [guided(case)])
    assert list(output.outputs[0].token_ids) == bench.want[label]


def test_windows_make_followers_later(roomy: Engine, bench: Bench) -> None:
    """In the window the texts are those of a request whose prompt ends with the text so far."""
    case = bench.cases["VCD"]
    streams = Streams(bench.folder, bench.name)
    leader = streams.prompt(case.text, case.images)
    follower = streams.prompt(case.text, [noised(case.images[0])])
    first, _ = streams.generate([leader], [1.0], 5)
    want = list(first)
    for _ in range(6):
        rows = [streams.log_probs(p, want) for p in (leader, follower)]
        blend = 2 * rows[0] - rows[1]
        want.append(int(blend.masked_fill(rows[0] < rows[0].max() - 2.302585, -1e9).argmax()))
    fields = {**case.fields, "guidance_start": 5, "guidance_end": 11}
    params = guided(case, extra_args=fields)
    (output,) = run(roomy, [case.prompt], [params])
    assert list(output.outputs[0].token_ids)[:11] == want


def test_several_choices_logprobs_and_grammars(roomy: Engine, bench: Bench) -> None:
    """What vLLM does for a request, it does for a group with images."""
    from vllm.sampling_params import StructuredOutputsParams

    case = bench.cases["ICD"]
    fields = {**case.fields, "guidance_logprobs": True}
    params = guided(case, n=2, temperature=1.0, top_k=1, logprobs=1, extra_args=fields)
    (output,) = run(roomy, [case.prompt], [params])
    assert [list(choice.token_ids) for choice in output.outputs] == [bench.want["ICD"]] * 2
    rule = StructuredOutputsParams(regex="[ab]{4}")
    (output,) = run(roomy, [case.prompt], [guided(case, structured_outputs=rule, ignore_eos=False)])
    assert set(output.outputs[0].text) <= {"a", "b"}
    assert len(output.outputs[0].text) == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "address instead of an image": (
        {"negative_multi_modal_data": {"image": ["http://127.0.0.1/a.png"]}},
        "not its address",
    ),
    "a name": ({"negative_multi_modal_data": "anything"}, "send messages with image parts"),
    "no object": ({"negative_multi_modal_data": 5}, "must be an object"),
    "another number of images": (
        {"negative_multi_modal_data": {"image": [picture(1), picture(2), picture(3)]}},
        "cannot be used",
    ),
    "two negatives in one": (
        {
            "guidance_streams": [{"weight": -1, "prompt": "x", "token_ids": [5]}],
            "guidance_scale": 1,
        },
        "send only one",
    ),
}


@pytest.mark.parametrize("label", list(REFUSED))
def test_refused(roomy: Engine, bench: Bench, label: str) -> None:
    fields, sentence = REFUSED[label]
    case = bench.cases["VCD"]
    with pytest.raises(ValueError, match=sentence):
        run(roomy, [case.prompt], [guided(case, extra_args={"guidance_scale": 2, **fields})])


@pytest.mark.parametrize("bench", ["llava"], indirect=True)
def test_prompts_that_end_with_an_image_are_refused(roomy: Engine, bench: Bench) -> None:
    case, place = bench.cases["VCD"], PLACES[bench.name]
    ends = {"prompt": f"See {place}", "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(ValueError, match="put the question after it"):
        run(roomy, [ends], [plain(extra_args={"guidance_scale": 2, "negative_prompt": "x"})])
    fields = {"guidance_streams": [{**ends, "weight": -1}]}
    with pytest.raises(ValueError, match="put the question after it"):
        run(roomy, [case.prompt], [plain(extra_args=fields)])
    (output,) = run(roomy, [ends], [plain(max_tokens=2)])  # plain requests may
    assert len(output.outputs[0].token_ids) == 2


def test_images_need_the_text_of_the_prompt(roomy: Engine, bench: Bench) -> None:
    """A follower with images and no prompt takes the leader's text, if that is known."""
    with pytest.raises(ValueError, match="give a prompt, too"):
        roomy.generate(
            [[5, 6, 7]],
            [
                plain(
                    extra_args={
                        "guidance_scale": 2,
                        "negative_multi_modal_data": {"image": picture(1)},
                    }
                )
            ],
        )


def test_a_refused_request_leaves_its_image_to_the_next(roomy: Engine, bench: Bench) -> None:
    """vLLM sends an image to the engine once. After a refusal it must be sent again."""
    case = bench.cases["M3ID"]
    new = {**case.prompt, "multi_modal_data": {"image": [picture(77)]}}
    with pytest.raises(ValueError, match="must be a number"):
        run(roomy, [new], [guided(case, extra_args={"guidance_scale": "x"})])
    long = {"guidance_scale": 2, "negative_prompt_token_ids": [5] * 300}
    with pytest.raises(ValueError, match="must fit"):
        run(roomy, [new], [guided(case, extra_args=long)])
    assert run(roomy, [new], [guided(case)])
