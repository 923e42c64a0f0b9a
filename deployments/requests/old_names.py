"""The fields that vLLM took before `structured_outputs`. Older clients still send them.

Pure. Imports neither vllm nor ray.
"""

from __future__ import annotations

from typing import Any

from cfg_core.errors import RequestError
from cfg_core.grammars.bounds import STRUCTURED_OUTPUTS
from deployments.requests.endpoints import Endpoint

_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OPTIONS = {"guided_whitespace_pattern": "whitespace_pattern"}
_ENDPOINTS: tuple[Endpoint, ...] = ("completion", "chat", "batch")


def with_structured_outputs(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """The body with `structured_outputs` in place of the fields that it replaced.

    Raises RequestError for two of them, or for one beside `structured_outputs`.
    """
    given = [name for name in _KINDS if body.get(name) is not None]
    if endpoint not in _ENDPOINTS or not given:
        return body
    taken = [*given, *([STRUCTURED_OUTPUTS] if body.get(STRUCTURED_OUTPUTS) is not None else ())]
    if len(taken) > 1:
        raise RequestError(f"{' and '.join(taken)} exclude each other: send one of them.", taken[0])
    names = {**_KINDS, **_OPTIONS}
    outputs = {ours: body[name] for name, ours in names.items() if body.get(name) is not None}
    rest = {name: value for name, value in body.items() if name not in names}
    return {**rest, STRUCTURED_OUTPUTS: outputs}
