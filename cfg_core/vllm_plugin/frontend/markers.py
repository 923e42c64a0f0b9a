"""The markers of a request as token ids: texts, and the model's own markers of its reasoning."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.v1.engine.input_processor import InputProcessor

from cfg_core.errors import GuidanceError
from cfg_core.params import GuidanceParams
from cfg_core.params.between import Between
from cfg_core.params.fields import BETWEEN, PART


def with_token_ids(processor: InputProcessor, params: GuidanceParams) -> GuidanceParams:
    """The same guidance with its markers as token ids of the model. Raises GuidanceError."""
    between = params.between
    if params.part is not None:
        between = _of_part(processor, params.part)
    if between is None:
        return params
    start = _token_id(processor, between.start_token_id, f"{BETWEEN}.start_token_id")
    end = between.end_token_id
    if end is not None:
        end = _token_id(processor, end, f"{BETWEEN}.end_token_id")
    if start == end:
        raise GuidanceError(
            f"{BETWEEN}: start_token_id and end_token_id are both token {start}: give two tokens.",
            BETWEEN,
        )
    found = Between(start, end, between.restart_negative)
    return dataclasses.replace(params, between=found, part=None)


def _token_id(processor: InputProcessor, marker: int | str, param: str) -> int:
    if isinstance(marker, str):
        ids = _tokenizer(processor, param).encode(marker, add_special_tokens=False)
        if len(ids) != 1:
            raise GuidanceError(
                f"{param} is {marker[:100]!r}, which is {len(ids)} tokens of this model: give a"
                " text that is one token, or a token id.",
                param,
            )
        return int(ids[0])
    size = processor.vllm_config.model_config.get_vocab_size()
    if marker >= size:
        raise GuidanceError(
            f"{param} is {marker}: token ids of this model are in [0, {size}).", param
        )
    return marker


def _tokenizer(processor: InputProcessor, param: str) -> Any:
    tokenizer = processor.renderer.tokenizer
    if tokenizer is None:
        raise GuidanceError(
            f"{param} needs a tokenizer, and this engine has none: give token ids.", param
        )
    return tokenizer


def _of_part(processor: InputProcessor, part: str) -> Between:
    """The markers of a part of the text, which the engine's reasoning parser knows."""
    name = processor.vllm_config.structured_outputs_config.reasoning_parser
    if not name:
        raise GuidanceError(
            f"{PART} needs a reasoning parser, and this engine has none: set reasoning_parser, or"
            f" send {BETWEEN} with the markers.",
            PART,
        )
    parser = ReasoningParserManager.get_reasoning_parser(name)(_tokenizer(processor, PART))
    start, end = (getattr(parser, f"{side}_token_id", None) for side in ("start", "end"))
    if not isinstance(start, int) or not isinstance(end, int):
        raise GuidanceError(
            f"{PART}: the reasoning parser {name} has no start and end that are one token each:"
            f" send {BETWEEN} with the markers.",
            PART,
        )
    return Between(start, end) if part == "thinking" else Between(end, start)
