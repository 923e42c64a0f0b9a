"""Logs as JSON, one object in each line, where Ray Serve's `logging_config` asks for it.

Serve writes the files of its replicas itself. vLLM has loggers of its own, in the replica and in
the engine core; `use_in_vllm` makes them write the same keys. vllm_logging.json names JsonLines and
LEVEL.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

VLLM_CONFIG = Path(__file__).with_name("vllm_logging.json")
VLLM_CONFIG_PATH, VLLM_CONFIGURE = "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"

LEVEL = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
"""The level of vLLM's loggers, in whatever case the environment names it, as in vLLM."""

_STANDARD = frozenset(
    (*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "stacklevel")
)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object, with the keys that Ray's formatter has.

    Fields of the record that are not standard are keys, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            "logger": record.name,
        }
        if record.exc_info:
            fields["exc_text"] = self.formatException(record.exc_info)
        more = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return json.dumps({**fields, **more}, default=str)


def is_wanted(logger: logging.Logger) -> bool:
    """Whether Serve has told this logger of its own to write JSON into its file."""
    formatters = (
        getattr(getattr(handler, "target", handler), "formatter", None)
        for handler in logger.handlers
    )
    return any(type(formatter).__name__ == "JSONFormatter" for formatter in formatters)


def use_in_vllm(environment: MutableMapping[str, str]) -> None:
    """Make vLLM, which is not imported yet, and its processes write JSON.

    A file that the environment names already stays. Nothing changes if the environment says that
    vLLM must not configure its loggers, because vLLM refuses to start with a file then.
    """
    if environment.get(VLLM_CONFIGURE, "1").strip() != "0":
        environment.setdefault(VLLM_CONFIG_PATH, str(VLLM_CONFIG))
