"""Read the bodies of text-embeddings-inference (TEI). Imports neither ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Input, RequestOptions, Task
from deployments.requests.body import json_type
from deployments.requests.encode.answer_formats import AnswerFormat, bare, predict, similarity
from deployments.requests.encode.field_checks import (
    read_dimensions,
    read_flag,
    read_inputs,
    read_text,
    read_texts,
    read_truncation,
)
from deployments.requests.encode.jobs import EncodeCall, EncodeJob
from deployments.requests.encode.prompts import read_instruction, read_prompt, read_role


def read_embed(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /embed: vectors as a bare list, normalised unless the body says otherwise."""
    inputs = read_inputs(body.get("inputs"), "inputs")
    options = RequestOptions(
        prompt=read_prompt(body, info, inputs),
        dimensions=read_dimensions(body, info),
        normalize=read_flag(body, "normalize", default=True),
        **read_truncation(body, info),
    )
    return _job(inputs, options, bare("embed"))


def read_embed_all(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /embed_all: the vectors of all tokens, as the model computes them.

    Those of late interaction are projected and normalised.
    """
    inputs = read_inputs(body.get("inputs"), "inputs")
    prompt = read_prompt(body, info, inputs)
    return _job(inputs, _options("token_embed", prompt, body, info), bare("token_embed"))


def read_embed_sparse(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /embed_sparse."""
    texts = read_texts(body, "inputs")
    prompt = read_prompt(body, info, texts)
    return _job(texts, _options("sparse", prompt, body, info), bare("sparse"))


def _options(task: Task, prompt: str, body: Mapping[str, Any], info: ModelInfo) -> RequestOptions:
    raw = task == "token_embed" and info.max_sim is None
    return RequestOptions(
        tasks=(task,),
        prompt=prompt,
        role=read_role(body),
        normalize=False if raw else None,
        **read_truncation(body, info),
    )


def _job(inputs: Sequence[Input], options: RequestOptions, answer: AnswerFormat) -> EncodeJob:
    call = EncodeCall(inputs=inputs, options=options, field="inputs")
    return EncodeJob(calls=(call,), answer=answer)


def read_predict(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /predict: the scores of all labels.

    `inputs` is a text, a pair of texts, or a list whose items are lists of one text or of two.
    """
    inputs, is_batch = _predicted(body.get("inputs"))
    options = RequestOptions(
        tasks=("classify",),
        prompt=read_instruction(body, info),
        raw_scores=read_flag(body, "raw_scores"),
        **read_truncation(body, info),
    )
    return _job(inputs, options, predict(info.labels, is_batch))


def _predicted(value: object) -> tuple[list[Input], bool]:
    """The inputs, and whether they are a batch. A list of texts is one input."""
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        inputs = [_text_or_pair(item, f"inputs[{i}]") for i, item in enumerate(value)]
        if any(type(item) is not type(inputs[0]) for item in inputs):
            raise RequestError("inputs holds texts and pairs: send one kind.", "inputs")
        return inputs, True
    return [_text_or_pair([value] if isinstance(value, str) else value, "inputs")], False


def _text_or_pair(item: object, place: str) -> Input:
    texts = item if isinstance(item, list) else []
    if len(texts) not in (1, 2) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(
            f"{place} must be a text, or a pair of texts: neither may be empty.", "inputs"
        )
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def read_similarity(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /similarity: the cosine of one sentence with each of several."""
    inputs, parameters = body.get("inputs"), body.get("parameters") or {}
    for name, value in (("inputs", inputs), ("parameters", parameters)):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} is {json_type(value)}: send an object.", name)
    assert isinstance(inputs, Mapping)
    source = read_text(inputs, "source_sentence")
    sentences = read_texts(inputs, "sentences")
    options = RequestOptions(
        prompt=read_prompt(parameters, info, sentences), **read_truncation(parameters, info)
    )
    calls = (
        EncodeCall(inputs=[source], options=options, field="source_sentence"),
        EncodeCall(inputs=sentences, options=options, field="sentences"),
    )
    return EncodeJob(calls=calls, answer=similarity())
