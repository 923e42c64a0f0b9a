"""Names in `chat_template_kwargs` that are no variables of a chat template.

vLLM passes the object on as keyword arguments of its own function and of transformers'
`apply_chat_template`. Some names are arguments that vLLM sets itself, or options of the tokenizer.
vLLM fails on them with the text of a Python error. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfg_core.errors import RequestError

FIELD = "chat_template_kwargs"

TAKEN = frozenset(
    {
        "self",
        "model_config",
        "tokenizer",
        "conversation",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of vLLM's and of transformers' function that are not the template's.

tests/contract/test_serving_names.py compares them with both.
"""


def check_template_kwargs(body: Mapping[str, Any]) -> None:
    """Raise RequestError that names a variable which a chat template cannot have."""
    given = body.get(FIELD)
    if isinstance(given, dict):
        for name in given:
            if name in TAKEN:
                raise RequestError(
                    f"{FIELD}.{name} is not a variable of a chat template: leave it out.",
                    f"{FIELD}.{name}",
                )
