"""The HTTP routes that generate text."""

# No `from __future__ import annotations`, and the class comes last: see ingress/app.py.

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from cfg_core.errors import UnknownModelError
from cfg_core.grammars import bounds
from cfg_core.params import looks_like_guidance
from deployments.admission.entries import Share
from deployments.admission.tenants import ANONYMOUS
from deployments.ingress.app import Routes, app, client_of, forwarded_headers, span_of, tenant_of
from deployments.messages import GenerateCall
from deployments.replica_client.admitted import GenerateJob
from deployments.replica_client.generator import GeneratorClient
from deployments.requests.demand import (
    Demand,
    check_answer_size,
    check_context,
    check_request_id,
    check_streams,
    copies_of,
    demand_of,
)
from deployments.requests.endpoints import Endpoint
from deployments.requests.group import GroupRequest, group_request
from deployments.requests.guidance_fields import Guidance, models_of, read_guidance
from deployments.requests.guidance_streams import check_number
from deployments.requests.old_names import with_structured_outputs
from deployments.requests.streams import streams_of
from deployments.requests.terms import PRIORITY, SOONEST, take_terms

SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request for generated text, read and checked without an engine.

    body: without its guidance fields, which are in `guidance`.
    """

    body: dict[str, Any]
    guidance: Guidance | None
    demand: Demand
    group: GroupRequest


class GenerateRoutes(Routes):
    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """Generate completions, in OpenAI's format with additional fields for guidance."""
        return await self._generate("completion", request)

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """Generate chat completions, in OpenAI's format with additional fields for guidance."""
        return await self._generate("chat", request)

    @app.post("/v1/chat/completions/batch")
    async def batch(self, request: Request) -> Response:
        """Answer several conversations at once, as vLLM does; they cannot be guided."""
        return await self._generate("batch", request)

    @app.post("/generative_scoring")
    async def generative_scoring(self, request: Request) -> Response:
        """Return the probability of tokens after a query and each item, as vLLM does.

        It cannot be guided.
        """
        return await self._generate("scoring", request)

    @app.post("/v1/responses")
    async def responses(self, request: Request) -> Response:
        """Generate a response, in the format of OpenAI's Responses API, with guidance fields.

        Responses are not stored, so `previous_response_id` and `background` are refused.
        """
        return await self._generate("responses", request)

    @app.post("/v1/messages")
    async def messages(self, request: Request) -> Response:
        """Generate a message, in the format of Anthropic's Messages API, with guidance fields."""
        return await self._generate("messages", request)

    async def _generate(self, endpoint: Endpoint, request: Request) -> Response:
        """Check what can be checked without an engine, and let the generator answer."""
        body = await self._bodies.read(request, partial(copies_of, endpoint))
        name = body.get("model")
        generator = await self._generator_of(name, tenant_of(request))
        read = partial(self._read, endpoint, body, request, generator)
        job = self._job(endpoint, await self._bodies.apart(request, read), request, generator)
        try:
            return await generator.answer(job)
        except UnknownModelError:
            raise self._encoders.unknown(str(name)) from None

    def _owner_of(self, request: Request) -> str | None:
        """The tenant whose KV cache no other tenant may reuse; None if prefixes are shared."""
        tenant = tenant_of(request)
        return None if tenant is ANONYMOUS or self._args.share_prefixes else tenant.name

    def _read(
        self,
        endpoint: Endpoint,
        body: dict[str, Any],
        request: Request,
        generator: GeneratorClient,
    ) -> ParsedRequest:
        """Read a request and check what needs no engine; may run in a thread.

        Whatever takes time in proportion to the length of the prompts is done here.
        """
        check_request_id(body)
        body = with_structured_outputs(endpoint, body)
        bounds.check_body(body)
        guidance = read_guidance(body, endpoint)
        if guidance is not None:
            check_number(guidance.streams, generator.args.followers_per_request)
        params = guidance.params if guidance is not None else None
        shown = len(params.weights) if params is not None and params.logprobs else 0
        groups = streams_of(endpoint, body, guidance)
        check_answer_size(endpoint, body, groups, self._args.limits.max_answer_bytes, shown)
        demand = demand_of(endpoint, body, guidance, groups)
        check_streams(demand, generator.args.admission.max_streams_per_request)
        owner, session = self._owner_of(request), request.headers.get(SESSION_HEADER)
        return ParsedRequest(
            body={name: value for name, value in body.items() if not looks_like_guidance(name)},
            guidance=guidance,
            demand=demand,
            group=group_request(endpoint, body, groups, tenant=owner, session=session),
        )

    def _job(
        self,
        endpoint: Endpoint,
        parsed: ParsedRequest,
        request: Request,
        generator: GeneratorClient,
    ) -> GenerateJob:
        tenant, body = tenant_of(request), parsed.body
        for name in models_of(body, parsed.guidance, generator.model_name):
            self._gate.allow_model(tenant, name)
        check_context(endpoint, body, generator.context_tokens())
        terms = take_terms(
            body,
            request.headers,
            default_timeout_s=generator.args.admission.default_timeout_s,
            min_priority=SOONEST if tenant.min_priority is None else tenant.min_priority,
        )
        if not generator.args.engine_orders_by_priority:
            body.pop(PRIORITY, None)
        call = GenerateCall(
            endpoint=endpoint,
            body=body,
            guidance=parsed.guidance,
            group=parsed.group,
            headers=forwarded_headers(request, body),
            client=client_of(request),
            tenant=self._owner_of(request),
        )
        return GenerateJob(
            call=call,
            share=Share(tenant=call.client, weight=tenant.weight, max_streams=tenant.max_streams),
            terms=terms,
            demand=parsed.demand,
            settle=self._gate.charge(tenant, parsed.demand.tokens).settle,
            span=span_of(request),
        )
