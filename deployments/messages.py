"""What the ingress and the replicas send each other. Imports neither Ray, vLLM nor torch.

A call to a generator carries one `GenerateCall`, and yields:

    Heartbeat*  (Chunk | Heartbeat)*  Heartbeat     a stream: the last Chunk is `[DONE]`
    Heartbeat*  Whole+  Heartbeat                   an answer in one piece, cut to fit messages
    ...  Heartbeat  Failed                          a failure, at any point

A failure crosses as a value, not as an exception: Serve logs a traceback for what is raised, and a
refused request is no event. Calls that answer once return their answer, or `Failed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from cfg_core.errors import CfgServeError
from deployments.requests.group import GroupRequest
from deployments.requests.guidance import Endpoint, Guidance
from deployments.requests.usage import Usage


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """One request for generated text, with its whole group.

    body: without the guidance fields' meaning taken out of it; `guidance` says what they mean.
    group: for the placement policy. headers: the client's, as far as vLLM reads them.
    client: who asks, a tenant or an address, for whatever is fair between clients.
    tenant: whose KV is found by nobody else; None where prefixes are shared.
    call_id: by which the ingress finds out which replica has it (routing/shared.py); a new one for
    each try.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    guidance: Guidance | None
    group: GroupRequest
    headers: Mapping[str, str]
    client: str = ""
    tenant: str | None = None
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One server-sent event of a stream, as vLLM words it."""

    text: str


@dataclass(frozen=True, slots=True)
class Whole:
    """A piece of an answer that is not streamed; the pieces joined are its JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The replica is at work. usage: what the engine has done for the call so far."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The call failed; nothing follows."""

    error: CfgServeError


Item: TypeAlias = Chunk | Whole | Heartbeat | Failed
