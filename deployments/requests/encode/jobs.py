"""Jobs for encoders: what an engine must compute for a request, and how an answer is made of it.

The ingress makes an EncodeJob of the body (readers.py) and sends it to one replica, where the
outputs become the answer (answers.py). Imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cfg_core.errors import RequestError
from cfg_core.prefill_only.types import Input, RequestOptions
from deployments.requests.encode.answers import Wording

_CHARACTERS_PER_TOKEN = 4  # roughly: for the estimate of a job's tokens


@dataclass(frozen=True, kw_only=True)
class EncodeCall:
    """Inputs that an engine computes with the same options.

    field: the field of the body that held them; errors name it.
    """

    inputs: Sequence[Input]
    options: RequestOptions
    field: str = "input"


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """One HTTP request: what to compute, and how to make the answer from it."""

    calls: tuple[EncodeCall, ...]
    answer: Wording

    @property
    def num_tokens(self) -> int:
        """The estimated number of tokens of all inputs.

        Replicas are compared by it, and the tenant is charged with it until the job has ended.
        """
        return sum(_size(item) for call in self.calls for item in call.inputs)


def in_terms_of(call: EncodeCall, error: RequestError) -> RequestError:
    """The engine's error, with the field that the client sent in place of `input`.

    The engine calls every field `input`.
    """
    if error.param != "input" or call.field == "input":
        return error
    return RequestError(f"{call.field}: {error.message}", call.field)


def _size(item: Input) -> int:
    if isinstance(item, tuple):
        return sum(map(_size, item))
    return len(item) // _CHARACTERS_PER_TOKEN + 2 if isinstance(item, str) else len(item)
