"""The documented fields are those that the code reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cfg_core.params import SYNONYMS
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from deployments.requests.encode.capabilities import EncodeEndpoint
from deployments.requests.encode.readers import READERS, refuse_foreign_fields
from deployments.requests.guidance import CHAT_FIELDS, read_guidance
from deployments.requests.schemas import ENCODE, ENCODE_EXAMPLES, EXAMPLES, GUIDANCE


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


def test_every_guidance_field_is_documented() -> None:
    assert set(GUIDANCE) == {*CHAT_FIELDS, *SYNONYMS}


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
