"""Refuses guidance in a beam search, where vLLM's own server would ignore it.

Each step of a beam search makes new requests, without the extra arguments of the client's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params import GuidanceParams, looks_like_guidance


def to_beam_search_params(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `to_beam_search_params` of vLLM's request classes.

    It raises GuidanceError if the request is guided, or says something wrong about guidance.
    """

    @functools.wraps(stock)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        extra = getattr(self, "vllm_xargs", None) or {}
        if any(map(looks_like_guidance, extra)):
            params = GuidanceParams.from_fields(extra)
            if params is not None and params.enabled:
                raise GuidanceError(
                    "Beam search cannot be guided: leave out use_beam_search, or the guidance"
                    " fields.",
                    "use_beam_search",
                )
        return stock(self, *args, **kwargs)

    return to_beam_search_params
