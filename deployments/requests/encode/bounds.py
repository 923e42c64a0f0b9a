"""The bounds of one request to an encoder, checked in the ingress.

A job holds references to the texts of the body. So the checks cost only additions, and come before
any prompt or query is joined with a text. Imports neither ray nor torch.
"""

from __future__ import annotations

from cfg_core.errors import RequestError
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.sizes import check_num_tokens, check_sizes
from deployments.requests.encode.jobs import EncodeCall, EncodeJob, in_terms_of


def check_job(job: EncodeJob, options: EngineOptions) -> None:
    """Raise RequestError if a job is larger than the options of its encoder allow.

    The error names the field that makes most of the size. Tokens are counted where they are known,
    which is in inputs of token ids. The engine counts those of texts.
    """
    for call in job.calls:
        _check_queries(call, options.max_request_chars)
        try:
            check_sizes(call.inputs, call.options.prompt, options)
            check_num_tokens(_known_tokens(call), options)
        except RequestError as error:
            raise in_terms_of(call, error) from None


def _check_queries(call: EncodeCall, limit: int) -> None:
    """Raise RequestError if pairs are too large together because of their queries."""
    pairs = [item for item in call.inputs if isinstance(item, tuple)]
    if call.query_field is None or not pairs:
        return
    of_queries, of_documents = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    if of_queries + of_documents > limit and of_queries > of_documents:
        raise RequestError(
            f"{call.query_field} beside each of {len(pairs)} {call.field} makes"
            f" {of_queries + of_documents} characters, and one request may have {limit}: shorten"
            f" {call.query_field}, or send fewer {call.field}.",
            call.query_field,
        )


def _known_tokens(call: EncodeCall) -> int:
    most = call.options.truncate_to
    lengths = (len(item) for item in call.inputs if not isinstance(item, str | tuple))
    return sum(length if most is None else min(most, length) for length in lengths)
