"""Read what is put in front of texts: prompts by name, by text, or by what the texts are.

Imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.types import Input, Role
from deployments.requests.body import json_type

_QUERY = ("query", "search_query", "retrieval.query")
_DOCUMENT = ("passage", "document", "search_document", "retrieval.passage")
INPUT_TYPES = {
    "query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_query": _QUERY,
    "search_document": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Values of `input_type` (Cohere, Voyage, NVIDIA), and names of checkpoints' prompts for them."""


def read_prompt(body: Mapping[str, Any], info: ModelInfo, inputs: Sequence[Input]) -> str:
    """The text to put in front of each input text; inputs of token ids stay as they are."""
    names = ("prompt_name", "prompt", "input_type")
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise RequestError(f"{name} is {json_type(value)}: send a text.", name)
        if not isinstance(inputs[0], str):
            raise RequestError(
                f"{name} applies to single texts only: send texts, or leave it out.", name
            )
    if "input_type" not in given:
        return info.prompt_text(given.get("prompt_name"), given.get("prompt"))
    if len(given) > 1:
        other = next(iter(given))
        raise RequestError(f"input_type and {other} are both given: send only one.", "input_type")
    return read_input_type(body, info)


def read_input_type(body: Mapping[str, Any], info: ModelInfo) -> str:
    """The prompt of the checkpoint for what `input_type` says that the texts are.

    A model without such a prompt takes its default prompt: clients always send the field.
    """
    name = "input_type"
    value = body.get(name)
    if value is None:
        return info.default_prompt
    if isinstance(value, str) and value in info.prompts:
        return info.prompts[value]
    if not isinstance(value, str) or value.lower() not in INPUT_TYPES:
        known = ", ".join(dict.fromkeys([*INPUT_TYPES, *list(info.prompts)[:20]]))
        raise RequestError(f"{name} must be one of {known}.", name)
    return prompt_for(info, value.lower())


def read_role(body: Mapping[str, Any]) -> Role:
    """What `input_type` makes of texts for late interaction. Other values mean documents."""
    return (
        "query" if str(body.get("input_type")).lower() in ("query", "search_query") else "document"
    )


def prompt_for(info: ModelInfo, input_type: str) -> str:
    """The prompt for texts of a type, by the names that checkpoints give to it."""
    prompts = {name.lower(): text for name, text in info.prompts.items()}
    names = INPUT_TYPES[input_type]
    return next((prompts[name] for name in names if name in prompts), info.default_prompt)


def read_instruction(body: Mapping[str, Any], info: ModelInfo) -> str:
    """The instruction for pairs; empty if the model takes none."""
    name = "instruction"
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} is {json_type(value)}: send a text.", name)
    info.check_instruction(value)
    return info.prompt_text(None, value) if info.takes_instruction else ""
