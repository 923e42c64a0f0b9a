"""Starting vLLM in a Serve replica without losing the replica's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_handlers_kept() -> Iterator[None]:
    """Keep vLLM from closing the existing log handlers while it is imported and started.

    vLLM 0.32 configures logging by `logging.config.dictConfig`, on import and again for each
    engine. dictConfig first closes every handler of the process, Serve's too. Afterwards a
    replica's log file stays empty. And when Serve's controller restarts (Ray 2.60), it asks each
    replica for the path of that file, gets an exception, and replaces all replicas.
    """
    kept = logging._handlerList[:]  # type: ignore[attr-defined] # what dictConfig closes
    logging._handlerList.clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logging._handlerList[:0] = kept  # type: ignore[attr-defined]
