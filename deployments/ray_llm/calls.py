"""From a request, as Ray's ingress has parsed it, to a GenerateCall of ours.

Ray's classes of requests keep fields that they do not know, so the fields of guidance arrive in
them. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from cfg_core.errors import GuidanceError
from cfg_core.grammars import bounds
from cfg_core.logits_processors.config import FIELD as LOGITS_PROCESSORS
from cfg_core.params import looks_like_guidance
from deployments.messages import GenerateCall
from deployments.requests.endpoints import Endpoint
from deployments.requests.group import GroupRequest
from deployments.requests.guidance_fields import carried, read_guidance
from deployments.requests.old_names import with_structured_outputs

XARGS = "vllm_xargs"


def body_of(request: BaseModel) -> dict[str, Any]:
    """The JSON body that a parsed request came from, without fields that were not sent."""
    text = request.model_dump_json(exclude_unset=True, by_alias=True, warnings=False)
    body: dict[str, Any] = json.loads(text)
    return body


def read_call(
    endpoint: Endpoint, body: dict[str, Any], headers: Mapping[str, str]
) -> GenerateCall | None:
    """The call for a body with guidance or logits processors; None for a body without.

    Guidance may be at the top level, as over our own server, or in `vllm_xargs`, as under `vllm
    serve`. Raises RequestError for every mistake that can be found without the model, a misspelt
    field among them.
    """
    inner = carried(body, XARGS)
    in_xargs = [name for name in inner if looks_like_guidance(name)]
    rest = {name: value for name, value in inner.items() if name not in in_xargs}
    guidance = read_guidance({**body, XARGS: rest}, endpoint)
    if guidance is not None and in_xargs:
        raise GuidanceError(
            f"{in_xargs[0]} is inside {XARGS}, and there is guidance at the top level, too: move"
            " it there.",
            XARGS,
        )
    if guidance is None and not in_xargs and body.get(LOGITS_PROCESSORS) is None:
        return None
    body = with_structured_outputs(endpoint, body)
    bounds.check_body(body)
    return GenerateCall(
        endpoint=endpoint,
        body={name: value for name, value in body.items() if not looks_like_guidance(name)},
        guidance=guidance,
        group=GroupRequest(prefixes=()),  # for placement, which Ray has done
        headers={name.lower(): value for name, value in headers.items()},
    )
