"""Scores over HTTP: an unmodified openai client, and lm-evaluation-harness with our adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cfg_core.reference import CausalLM, Formula, weighted_scores
from tools.serving.process import REPOSITORY, Json

CONTEXT = "Tell me a story about the sea.\n"
NEGATIVE = "Tell me a story.\n"
ENDINGS = ("Once upon a time there was a fish.", "The king slept.", "A ship sailed far away.")
ERROR = 2e-4
"""Two float32 implementations differ by up to 2e-5 (|s| + |1 - s|)."""

TOPICS = ("the sea", "a farm", "space", "a castle", "the forest")
ITEMS: list[Json] = [
    {
        "context": f"Listen. Tell me a story about {topic}.",
        "endings": [
            "A cow stood in the field.",
            "The ship was on the water.",
            "A knight rode out.",
        ],
        "gold": i % 3,
    }
    for i, topic in enumerate(TOPICS)
]
TASK = """\
task: local_endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: endings
doc_to_target: gold
target_delimiter: "\\n"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def ids(http: httpx.Client, model: str) -> Any:
    def encode(text: str) -> list[int]:
        body = {"model": model, "prompt": text}
        found: list[int] = http.post("/tokenize", json=body).json()["tokens"]
        return found

    return encode


def reference(
    oracle: CausalLM, context: list[int], negative: list[int], scored: list[int], scale: float
) -> list[float]:
    formula = Formula(scales=((0, scale),))
    rows = weighted_scores(oracle, context, [negative], scored, formula)
    return [float(row[token]) for token, row in zip(scored, rows, strict=True)]


def asking(scored: int, **more: Any) -> Json:
    return {
        "guidance_scale": 2.0,
        "negative_prompt": NEGATIVE,
        "guidance_score_tokens": scored,
        **more,
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_openai_client_gets_the_scores_of_the_reference(
    client: openai.OpenAI, model: str, oracle: CausalLM, ids: Any, stream: bool
) -> None:
    context, scored = ids(CONTEXT), ids(CONTEXT + ENDINGS[0])[len(ids(CONTEXT)) :]
    want = reference(oracle, context, ids(NEGATIVE), scored, 2.0)
    answer: Any = client.completions.create(
        model=model,
        prompt=[*context, *scored],
        echo=True,
        logprobs=2,
        max_tokens=3,
        temperature=0,
        stream=stream,
        extra_body=asking(len(scored)),
    )
    chunks = [one.to_dict() for one in (answer if stream else [answer])]
    shown = [c["choices"][0]["logprobs"] for c in chunks if c.get("choices")]
    values = [value for part in shown if part for value in part["token_logprobs"]]
    tops = [top for part in shown if part for top in part["top_logprobs"]]
    assert len(values) == len(context) + len(scored) + 3
    assert values[: len(context)] == [None] * len(context)
    assert tops[: len(context)] == [None] * len(context)
    assert values[len(context) : -3] == pytest.approx(want, abs=ERROR)
    assert all(len(top) >= 2 for top in tops[len(context) :])
    assert chunks[-1]["guidance"] == {
        "scale": 2.0,
        "streams": 2,
        "negative_prompt_tokens": len(ids(NEGATIVE)),
        "guided_tokens": 3,
        "scored_tokens": len(scored),
    }


def test_nothing_need_be_generated(
    client: openai.OpenAI, model: str, oracle: CausalLM, ids: Any
) -> None:
    context, scored = ids(CONTEXT), ids(ENDINGS[1])
    answer = client.completions.create(
        model=model,
        prompt=[*context, *scored],
        echo=True,
        logprobs=0,
        max_tokens=0,
        extra_body=asking(len(scored)),
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    want = reference(oracle, context, ids(NEGATIVE), scored, 2.0)
    assert logprobs.token_logprobs[len(context) :] == pytest.approx(want, abs=ERROR)


def test_at_scale_1_the_scores_are_the_conditional_ones(
    client: openai.OpenAI, model: str, oracle: CausalLM, ids: Any
) -> None:
    context, scored = ids(CONTEXT), ids(ENDINGS[1])
    body = asking(len(scored), guidance_scale=1)
    answer = client.completions.create(
        model=model, prompt=[*context, *scored], echo=True, logprobs=0, extra_body=body
    )
    logprobs: Any = answer.choices[0].logprobs
    want = reference(oracle, context, ids(NEGATIVE), scored, 1.0)
    shown = logprobs.token_logprobs[len(context) : len(context) + len(scored)]
    assert shown == pytest.approx(want, abs=ERROR)
    guidance: Any = answer.to_dict()["guidance"]
    assert guidance["scored_tokens"] == len(scored)
    assert guidance["streams"] == 1


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one multiple-choice task of the harness."""
    folder = tmp_path_factory.mktemp("harness")
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (folder / "local_endings.yaml").write_text(TASK.format(data=data))
    return folder


def harness(task: Path, url: str, model: str, **options: Any) -> tuple[float, list[list[float]]]:
    """Run the harness. Returns the accuracy, and each choice's log-probability."""
    folder = REPOSITORY / "models" / model
    arguments = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer": str(folder)}
    out = task / "out.json"
    run = [
        f"--include_path={task}",
        "--tasks=local_endings",
        "--log_samples",
        f"--output_path={out}",
        "--model_args",
        json.dumps({**arguments, "max_length": 256, "add_bos_token": True, **options}),
    ]
    oracle_folder = Path(sys.prefix) / "oracle"
    done = subprocess.run(
        [sys.executable, "-m", "cfg_core.harness", "run", "--model=cfg-serve", *run],
        env={**os.environ, "PYTHONPATH": str(oracle_folder), "HF_HOME": str(task)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = task.glob("out*.json")
    (samples,) = task.glob("samples*.jsonl")
    accuracy: float = json.loads(results.read_text())["results"]["local_endings"]["acc,none"]
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda r: r["doc_id"])
    for file in (results, samples):
        file.unlink()
    return accuracy, [[float(r[0][0]) for r in row["resps"]] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "options"),
    [
        pytest.param(
            *(2, {"num_concurrent": 4, "negative_prompt": NEGATIVE}),
            marks=pytest.mark.survey,
            id="one negative",
        ),
        pytest.param(3, {"negative_from": "Tell"}, id="negatives from contexts"),
    ],
)
def test_the_harness_scores_as_the_reference(
    server: Any,
    model: str,
    oracle: CausalLM,
    ids: Any,
    task: Path,
    scale: float,
    options: dict[str, Any],
) -> None:
    accuracy, found = harness(task, server.url, model, guidance_scale=scale, **options)
    right = 0
    for item, values in zip(ITEMS, found, strict=True):
        text, endings = str(item["context"]), list(item["endings"])
        negative = ids(NEGATIVE)
        if "negative_from" in options:
            negative = ids(text[text.rfind("Tell") :])
        want = []
        for ending in endings:
            context = ids(text)
            scored = ids(f"{text}\n{ending}")[len(context) :]
            want.append(sum(reference(oracle, context, negative, scored, scale)))
        assert values == pytest.approx(want, abs=1e-3)
        right += want.index(max(want)) == item["gold"]
    assert accuracy == pytest.approx(right / len(ITEMS))


def test_generated_texts_have_negatives_from_their_contexts(model: str) -> None:
    """The payload of a generation, without a server."""
    program = f"""
from cfg_core.harness import GuidedCompletions
folder = {str(REPOSITORY / "models" / model)!r}
url = "http://127.0.0.1:1/v1/completions"
options = dict(model="m", tokenizer=folder, base_url=url, tokenizer_backend="huggingface")
lm = GuidedCompletions(negative_from="Tell", guidance_scale=2, **options)
ids = lm.tok_encode("Listen. Tell me a story.")
payload = lm._create_payload([ids], generate=True, gen_kwargs={{}})
assert payload["negative_prompt_token_ids"] == lm.tok_encode("Tell me a story."), payload
assert payload["guidance_scale"] == 2.0
try:
    lm._create_payload([lm.tok_encode("Listen.")], generate=True, gen_kwargs={{}})
except ValueError as error:
    assert "has no 'Tell'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "oracle")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
