"""vLLM's renderer (templates, tokenizing, decoding) with a lane for long texts.

Short texts never wait behind long ones. vLLM renders in one thread, first come, first served, so
six texts of two megabytes block it for ten seconds. Its tokenizer is a pool of copies, and may be
used from any number of threads.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from vllm.renderers.base import BaseRenderer

from cfg_core.lanes import Lanes, num_chars


class LanesExecutor(Executor):
    """Stands in for vLLM's pool of rendering threads.

    A job's lane is chosen by the length of the texts that it was given.
    """

    def __init__(self, num_short: int) -> None:
        self._lanes = Lanes("renderer", num_short)

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        given = [*args, *kwargs.values()]
        if isinstance(function, partial):
            given += [*function.args, *function.keywords.values()]
        return self._lanes.submit(num_chars(given), function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._lanes.close()


def use_lanes(renderer: BaseRenderer) -> None:
    """Make `renderer` work in lanes.

    vLLM replaces its pool when a template hangs. The new pool has lanes, too.
    """
    executor = renderer._executor
    num_short = executor._max_workers

    def replace_inner() -> None:
        executor._inner.shutdown(wait=False)
        executor._inner = LanesExecutor(num_short)

    executor.replace_inner = replace_inner
    replace_inner()
