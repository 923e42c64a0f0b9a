"""The documented fields are those that the code reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cfg_core.prefill_only.models.checkpoint import ModelInfo
from deployments.generator.answers.report import guidance_report
from deployments.ingress.openapi.document import REPORT, guidance_of
from deployments.ingress.openapi.schemas import ENCODE, ENCODE_EXAMPLES, EXAMPLES, GUIDANCE
from deployments.requests.encode.capabilities import EncodeEndpoint
from deployments.requests.encode.readers import READERS, refuse_foreign_fields
from deployments.requests.guidance_fields import read_guidance


class Recorder(Mapping[str, Any]):
    """A body that remembers which fields were read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields, self.read = fields, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def test_what_is_for_python_alone_is_not_documented() -> None:
    assert "negative_multi_modal_data" not in GUIDANCE
    items = GUIDANCE["guidance_streams"]["items"]
    assert "multi_modal_data" not in items["properties"]
    assert items["required"] == ["weight"]


def test_a_completion_has_no_fields_of_conversations() -> None:
    fields = guidance_of("completion")
    assert set(guidance_of("chat")) - set(fields) == {"negative_messages"}
    assert "messages" not in fields["guidance_streams"]["items"]["properties"]
    assert "messages" in guidance_of("chat")["guidance_streams"]["items"]["properties"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guidance_scale": 2, "guidance_end": 3},
        {"guidance_schedule": [[0, 2]]},
        {"guidance_streams": [{"weight": 1, "prompt": "a"}]},
    ],
)
def test_every_key_of_the_report_is_documented(fields: dict[str, Any]) -> None:
    guidance = read_guidance(fields, "chat")
    assert guidance is not None
    assert guidance_report(guidance, 1, 2, "note").keys() <= REPORT["properties"].keys()


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_have_valid_guidance(path: str) -> None:
    endpoint = "completion" if "prompt" in EXAMPLES[path] else "chat"
    guidance = read_guidance(EXAMPLES[path], endpoint)
    assert guidance is None or guidance.enabled


INFO = ModelInfo(
    tasks=("embed", "classify", "sparse"),
    dimension=8,
    max_input_tokens=64,
    vocab_size=100,
    dtype="float32",
    labels=("a", "b"),
    prompts={"query": "q: "},
)


@pytest.mark.parametrize("endpoint", READERS)
def test_the_fields_that_are_read_are_documented(endpoint: EncodeEndpoint) -> None:
    bodies = [dict(ENCODE_EXAMPLES[endpoint])]
    if endpoint == "rerank":
        bodies.append({"query": "q", "texts": ["a"]})
    if endpoint == "score":
        bodies += [{"queries": "a", "items": "b"}, {"data_1": "a", "data_2": "b"}]
    for body in bodies:
        recorder = Recorder(body)
        refuse_foreign_fields(recorder)
        READERS[endpoint](recorder, "m", INFO)
        from_others = {"extra_args", "vllm_xargs", "extra_body", "sampling_params", "extra_params"}
        carriers = {"chat_template_kwargs", "generation_config", "model_kwargs", "custom_params"}
        read = recorder.read - from_others - carriers - {"parameters", "params", "options"}
        assert read <= set(ENCODE[endpoint]["properties"])
