"""Read the bodies of requests to encoders into jobs.

The ingress does it, so bad requests are refused without a call to an engine.

The formats are those of OpenAI (embeddings), Cohere, Jina and TEI (rerank, embed_sparse) and vLLM
(the rest). Unknown fields are ignored, as all of these servers do, except fields that look like
guidance. Imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cfg_core.errors import GuidanceError, RequestError
from cfg_core.params import looks_like_guidance
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Input, RequestOptions, Role, Task
from cfg_core.prefill_only.vector_formats import BYTES
from deployments.requests.encode import answer_formats, cohere, tei
from deployments.requests.encode.capabilities import EncodeEndpoint, can_serve, cannot_serve
from deployments.requests.encode.field_checks import (
    check_number,
    read_activation,
    read_dimensions,
    read_document,
    read_flag,
    read_format,
    read_inputs,
    read_text,
    read_texts,
    read_truncation,
    read_whole_number,
)
from deployments.requests.encode.jobs import EncodeCall, EncodeJob
from deployments.requests.encode.prompts import prompt_for, read_instruction, read_prompt, read_role
from deployments.requests.encode.scores import Compared
from deployments.requests.guidance_fields import CARRIERS, carried, near_miss

SCORE_FIELDS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


def read_job(
    endpoint: EncodeEndpoint, body: Mapping[str, Any], model: str, info: ModelInfo
) -> EncodeJob:
    """The job that a request body asks for.

    Raises RequestError for every mistake that can be found without tokenizing. The engine checks
    lengths and token ids.

    model: its name for clients.
    """
    if not can_serve(info, endpoint):
        raise cannot_serve(model, info, endpoint)
    refuse_foreign_fields(body)
    return READERS[endpoint](body, model, info)


def refuse_foreign_fields(body: Mapping[str, Any]) -> None:
    """Raise RequestError for fields that ask for something that encoders cannot do."""
    inner = [name for carrier in CARRIERS for name in carried(body, carrier)]
    for name in (*body, *inner):
        if (looks_like_guidance(name) or near_miss(name)) and body.get(name, name) is not None:
            raise GuidanceError(
                f"{name} guides generated text, and encoders generate none: leave it out.", name
            )
    if body.get("messages") is not None:
        raise RequestError("messages are for chat models: send the text as input.", "messages")
    if body.get("add_special_tokens") is False:
        hint = "send token ids instead of text"
        raise RequestError(
            f"texts always get the model's special tokens: {hint}.", "add_special_tokens"
        )


def _embeddings(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    inputs = read_inputs(body.get("input"))
    options = RequestOptions(
        prompt=read_prompt(body, info, inputs),
        dimensions=read_dimensions(body, info),
        normalize=read_activation(body),
        **read_truncation(body, info),
    )
    form = read_format(body, info)
    options = _for_format(form, options, info)
    answer = answer_formats.embeddings(model, form)
    return EncodeJob(calls=(EncodeCall(inputs=inputs, options=options),), answer=answer)


def _for_format(
    form: answer_formats.NumberFormat, options: RequestOptions, info: ModelInfo
) -> RequestOptions:
    """The options of dense vectors in a format: those in bytes are normalised."""
    check_number(form.number, options, info, "embed_dtype")
    return replace(options, normalize=True) if form.number in BYTES else options


def _rerank(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /rerank: Cohere's and Jina's format has `documents`, TEI's has `texts`."""
    has_documents, has_texts = body.get("documents") is not None, body.get("texts") is not None
    if has_documents == has_texts:
        given = "both given: send only one" if has_texts else "both missing: send documents"
        raise RequestError(
            f"documents (as Cohere and Jina) and texts (as TEI) are {given}.", "documents"
        )
    query = read_text(body, "query")
    return _tei_rerank(body, query, info) if has_texts else _cohere_rerank(body, query, model, info)


def _cohere_rerank(body: Mapping[str, Any], query: str, model: str, info: ModelInfo) -> EncodeJob:
    documents = read_texts(body, "documents", read_document)
    top_n = read_whole_number(body, "top_n", lowest=0)
    kept = documents if read_flag(body, "return_documents") else None
    calls, compared = _comparisons(
        ([query], "query"), (documents, "documents"), body, info, read_activation(body) is False
    )
    return EncodeJob(
        calls=calls, answer=answer_formats.rerank(model, compared, top_n or None, kept)
    )


def _tei_rerank(body: Mapping[str, Any], query: str, info: ModelInfo) -> EncodeJob:
    texts = read_texts(body, "texts")
    kept = texts if read_flag(body, "return_text") else None
    calls, compared = _comparisons(
        ([query], "query"), (texts, "texts"), body, info, read_flag(body, "raw_scores")
    )
    return EncodeJob(calls=calls, answer=answer_formats.rerank_as_tei(compared, kept))


def _score(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    """The job of /score: one text with one, one with N, or N with N, as in vLLM."""
    names = next(
        (pair for pair in SCORE_FIELDS if all(body.get(name) is not None for name in pair)), None
    )
    if names is None:
        raise RequestError(
            "text_1 and text_2 are not both given: send both, or queries and documents.", "text_1"
        )
    left, right = (read_texts(body, name) for name in names)
    if len(left) not in (1, len(right)):
        hint = f"send one, or as many as {names[1]}"
        raise RequestError(
            f"{names[0]} has {len(left)} texts and {names[1]} has {len(right)}: {hint}.", names[0]
        )
    raw = read_activation(body) is False
    calls, compared = _comparisons((left, names[0]), (right, names[1]), body, info, raw)
    return EncodeJob(calls=calls, answer=answer_formats.score(model, compared))


def _pooling(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    task: Task = body.get("task") or info.tasks[0]
    if task not in info.tasks:
        raise RequestError(
            f"this model has no task {task!r:.60}: use {', '.join(info.tasks)}.", "task"
        )
    form = read_format(body, info)
    if form.as_base64 and task == "sparse":
        raise RequestError(
            "sparse vectors have no base64 form: set encoding_format to float.", "encoding_format"
        )
    if form.number != "float32" and task in ("sparse", "classify"):
        raise RequestError(f"{task} has no {form.number} form: leave it out.", "embed_dtype")
    inputs = read_inputs(body.get("input"), pairs=task == "classify")
    options = RequestOptions(
        tasks=(task,),
        prompt=_prompt_or_instruction(body, info, inputs),
        role=read_role(body),
        dimensions=read_dimensions(body, info) if task == "embed" else None,
        normalize=read_activation(body),
        raw_scores=read_activation(body) is False,
        **read_truncation(body, info),
    )
    if task == "embed":
        options = _for_format(form, options, info)
    return EncodeJob(
        calls=(EncodeCall(inputs=inputs, options=options),),
        answer=answer_formats.pooling(model, task, form),
    )


def _prompt_or_instruction(
    body: Mapping[str, Any], info: ModelInfo, inputs: Sequence[Input]
) -> str:
    if info.takes_instruction:
        return read_instruction(body, info)
    return read_prompt(body, info, inputs)


def _classify(body: Mapping[str, Any], model: str, info: ModelInfo) -> EncodeJob:
    inputs = read_inputs(body.get("input"), pairs=True)
    options = RequestOptions(
        tasks=("classify",),
        prompt=_prompt_or_instruction(body, info, inputs),
        raw_scores=read_activation(body) is False,
        **read_truncation(body, info),
    )
    answer = answer_formats.classify(model, info.labels)
    return EncodeJob(calls=(EncodeCall(inputs=inputs, options=options),), answer=answer)


READERS: dict[EncodeEndpoint, Callable[[Mapping[str, Any], str, ModelInfo], EncodeJob]] = {
    "embeddings": _embeddings,
    "rerank": _rerank,
    "score": _score,
    "pooling": _pooling,
    "classify": _classify,
    "embed_sparse": tei.read_embed_sparse,
    "cohere_embed": cohere.read_embed,
    "embed": tei.read_embed,
    "embed_all": tei.read_embed_all,
    "predict": tei.read_predict,
    "similarity": tei.read_similarity,
}


# --- comparing texts ------------------------------------------------------------------------------


def _comparisons(
    left: tuple[list[str], str],
    right: tuple[list[str], str],
    body: Mapping[str, Any],
    info: ModelInfo,
    raw: bool,
) -> tuple[tuple[EncodeCall, ...], Compared | None]:
    """The calls that compare each text on the right with one on the left, and how.

    A cross-encoder scores each pair. With an embedding model the score is the cosine of the two
    vectors, and with late interaction that of all vectors of tokens (MaxSim).

    left: queries and the name of their field; one query for all documents, or one for each.
    right: documents and the name of their field.
    raw: whether scores are left without the activation.
    """
    truncation = read_truncation(body, info)
    (queries, query_field), (documents, document_field) = left, right
    if info.takes_pairs:
        partners = queries * len(documents) if len(queries) == 1 else queries
        pairs = list(zip(partners, documents, strict=True))
        instruction = read_instruction(body, info)
        options = RequestOptions(
            tasks=("classify",), prompt=instruction, raw_scores=raw, **truncation
        )
        call = EncodeCall(
            inputs=pairs, options=options, field=document_field, query_field=query_field
        )
        return (call,), None
    info.check_instruction(body.get("instruction"))
    task = _compared_task(body, info)

    def call_of(role: Role, texts: list[str], name: str) -> EncodeCall:
        prompt = prompt_for(info, role)
        options = RequestOptions(tasks=(task,), prompt=prompt, role=role, **truncation)
        return EncodeCall(inputs=texts, options=options, field=name)

    calls = (
        call_of("query", queries, query_field),
        call_of("document", documents, document_field),
    )
    how = info.max_sim if task == "token_embed" else None
    return calls, Compared(len(queries), how)


def _compared_task(body: Mapping[str, Any], info: ModelInfo) -> Task:
    """The vectors that are compared: those of tokens if there are no others, or on demand."""
    tasks: list[Task] = ["embed"] if "embed" in info.tasks else []
    tasks += ["token_embed"] if info.max_sim is not None else []
    task = body.get("task")
    if task is None:
        return tasks[0]
    if task not in tasks:
        raise RequestError(f"task must be one of {', '.join(tasks)}.", "task")
    return tasks[tasks.index(task)]
