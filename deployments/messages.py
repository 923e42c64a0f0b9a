"""The messages between the ingress and the replicas.

A call to a generator carries one `GenerateCall`, and yields:

    Heartbeat*  Chunk+  [Heartbeat]     a stream, ended by its last Chunk (text_answers.is_last)
    Heartbeat*  Whole+                  an answer that is not streamed, in pieces
    ...  Failed                         a failure, at any point

Items also carry the usage, because a message of its own would cost the replica and the ingress up
to a millisecond. A failure is sent as a value and not raised, because Serve logs
a traceback for every exception, and a refused request is not worth one. Calls with a single answer
return it, or `Failed`. Imports neither Ray, vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cfg_core.errors import CfgServeError
from deployments.requests.endpoints import Endpoint
from deployments.requests.group import GroupRequest
from deployments.requests.guidance_fields import Guidance
from deployments.requests.progress import Begun, Progress, told_together
from deployments.requests.usage import Usage


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """One request for generated text, with its whole group.

    body: the client's JSON body, without `timeout`, `priority` and the guidance fields.
    guidance: the guidance fields, read and checked; None if there are none.
    group: what the placement policy needs to know.
    headers: those of the client's headers that vLLM reads.
    client: the tenant or the address that sent the request. Fair sharing goes by it.
    tenant: the tenant whose KV cache no other tenant may reuse; None if prefixes are shared.
    call_id: by this the ingress learns which replica has the call (routing/dispatches.py). Each try
    has a new one.
    begun: what another replica has done, which was lost; None at first.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    guidance: Guidance | None
    group: GroupRequest
    headers: Mapping[str, str]
    client: str = ""
    tenant: str | None = None
    call_id: str = ""
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One server-sent event of a stream, or several in a row, in vLLM's format.

    usage: the tokens that the engine has processed for the call so far; None if it is not told. The
        first Chunk of a stream has it, and the one that ends it.
    progress: what another replica needs to go on behind it; None if none can.
    leaves: the replica is to stop. The ingress should move the stream to another one; until it has,
        or if it cannot, the stream goes on here.
    """

    text: str
    usage: Usage | None = None
    progress: Progress | None = None
    leaves: bool = False


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of a stream in a row, at least one, as one."""
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        usages[-1] if usages else None,
        told_together([chunk.progress for chunk in chunks]),
        any(chunk.leaves for chunk in chunks),
    )


@dataclass(frozen=True, slots=True)
class Whole:
    """One piece of an answer that is not streamed.

    The joined pieces are its JSON text.

    usage: see Chunk. Each piece has the usage of the whole answer.
    """

    text: str
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign that the replica works on the call.

    usage: see Chunk.
    progress, leaves: of an answer that is not streamed: see Chunk. None and False in streams.
    """

    usage: Usage
    progress: Progress | None = None
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The call failed with `error`.

    No item follows.

    usage: see Chunk.
    """

    error: CfgServeError
    usage: Usage | None = None


Item: TypeAlias = Chunk | Whole | Heartbeat | Failed

OTHER_MODEL = "The stream was begun with other weights than this replica has."
"""Why a replica does not go on with a stream."""

LOST = "The engine was lost: send the request again."
"""What a client is told if its call was lost with a replica."""

INTERNAL = "Internal error: see the server's log."
"""What a client is told of an error that nobody expected."""
