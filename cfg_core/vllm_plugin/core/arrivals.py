"""What becomes of a request before the scheduler sees it, if it is guided or has begun elsewhere.

vLLM makes a Request in the thread that reads the frontend's messages, beside the steps of the
engine: it makes lists of token ids and hashes blocks there. The same is done here for followers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cfg_core.vllm_plugin.core import begun, followers, media

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore


def preprocess_add_request(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `EngineCore.preprocess_add_request`, which makes a Request."""

    @functools.wraps(stock)
    def preprocess_add_request(
        self: EngineCore, request: EngineCoreRequest, *args: Any, **kwargs: Any
    ) -> Any:
        of_followers = media.take(request)
        made = stock(self, request, *args, **kwargs)
        media.give(made[0], of_followers)
        begun.make_begun(made[0])
        followers.make_ready(made[0])
        return made

    return preprocess_add_request
