"""No text of a client in a log at WARNING or above.

vLLM logs what it refuses: names of models, prompts, the output that a parser could not read, and
exceptions that quote them. Its sentences are fixed, and their values are arguments. So in these
records only numbers are kept of the arguments, and of an exception its class and its place. The
error that the client gets says the rest.

Imports neither ray nor vllm.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from types import TracebackType
from typing import Any

CUT = "..."
"""Stands for a value that may be a client's text."""

READERS = (
    "vllm.entrypoints",
    "vllm.inputs",
    "vllm.multimodal",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.sampling_params",
    "vllm.tokenizers",
    "vllm.tool_parsers",
)
"""The modules of vLLM that read what clients send and what models answer."""


def hide_client_texts() -> None:
    """From now on, hide texts of clients in the records that this process makes.

    Called when the engine has started: what is logged before is about the configuration.
    """
    make = logging.getLogRecordFactory()
    if getattr(make, "hides_client_texts", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        return hidden(make(*args, **kwargs))

    record.hides_client_texts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record)
    warnings.filterwarnings("ignore", module="pydantic")  # they show the value


def hidden(record: logging.LogRecord) -> logging.LogRecord:
    """The same record without texts of clients, if it is one of those that may have some."""
    if not record.name:  # of logging.makeLogRecord, which sets all values later
        return record
    if record.levelno < logging.WARNING or not record.name.startswith(READERS):
        return record
    if isinstance(record.args, tuple):
        record.args = tuple(map(_number, record.args))
    elif record.args:
        record.args = {name: _number(value) for name, value in record.args.items()}
    if record.exc_info and record.exc_info[0] is not None:
        kind, _, where = record.exc_info
        record.exc_text, record.exc_info = _place(kind, where), None
    return record


def _number(value: object) -> object:
    return value if isinstance(value, int | float | None) else CUT


def _place(kind: type[BaseException], where: TracebackType | None) -> str:
    frames = "".join(traceback.format_tb(where))
    return f"Traceback (most recent call last):\n{frames}{kind.__name__}"
