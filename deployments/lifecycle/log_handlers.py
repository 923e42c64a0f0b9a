"""Starting vLLM in a Serve replica without losing the replica's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_handlers_kept() -> Iterator[None]:
    """While vllm is imported and started: keep it from closing the log handlers that are there.

    vLLM 0.32 configures logging by `logging.config.dictConfig`, on import and again for each
    engine, which first closes every handler of the process, Serve's too. After it a replica's log
    file stays empty; and when Serve's controller restarts (Ray 2.60), it asks each replica for the
    path of that file, gets an exception, and replaces them all.
    """
    kept = logging._handlerList[:]  # type: ignore[attr-defined] # what dictConfig closes
    logging._handlerList.clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logging._handlerList[:0] = kept  # type: ignore[attr-defined]
