"""The FastAPI application of CfgRouter: error responses, and what routes read from a request."""

# No `from __future__ import annotations` here, nor in modules with routes: Serve and FastAPI read
# the annotations of the routes. Serve pickles the routes when it makes a class that has some, so
# what they call must be defined above the class.

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cfg_core.errors import CfgServeError, RequestError
from deployments.admission.tenants import Gate, Tenant
from deployments.config.args import AppArgs
from deployments.http.errors import error_body, http_error
from deployments.http.open_requests import OpenRequests
from deployments.ingress.bodies import Bodies
from deployments.ingress.exchange import REFUSED, SPAN
from deployments.ingress.guard import install
from deployments.observability.spans import Span
from deployments.replica_client.encoders import Encoders
from deployments.replica_client.generator import GeneratorClient
from deployments.replica_client.generators import Generators

FORWARDED_HEADERS = ("x-request-id", "x-session-id", "traceparent")
"""Headers that vLLM's serving classes read. No other header of the client leaves the ingress.

A call that is traced has the `traceparent` of its own span (replica_client/admitted.py).
"""

NO_BODY: Mapping[str, Any] = MappingProxyType({})

app = FastAPI(openapi_url=None)  # ingress/routes/docs.py documents the routes
install(app)


@app.exception_handler(CfgServeError)
async def _on_own_error(request: Request, error: CfgServeError) -> JSONResponse:
    answer = http_error(error, request.scope["path"])
    request.scope["state"][REFUSED] = getattr(error, "reason", None)
    return JSONResponse(answer.body, answer.status, answer.headers)


@app.exception_handler(HTTPException)
async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Answer unknown paths and wrong methods in the shape of OpenAI's errors."""
    body = error_body(
        f"{request.method} {request.scope['path']}: {error.detail}.",
        error.status_code,
        "NotFoundError" if error.status_code == 404 else "BadRequestError",
    )
    return JSONResponse(body, error.status_code, error.headers)


def forwarded_headers(request: Request, body: Mapping[str, Any] = NO_BODY) -> dict[str, str]:
    """The headers of FORWARDED_HEADERS that the request has.

    The request id is left out if the body has one: vLLM would take the header's, which Serve's
    proxy makes for every request.
    """
    is_named = body.get("request_id") is not None
    names = FORWARDED_HEADERS[1:] if is_named else FORWARDED_HEADERS
    given = ((name, request.headers.get(name)) for name in names)
    return {name: value for name, value in given if value is not None}


def tenant_of(request: Request) -> Tenant:
    """The tenant that the request is counted for, as set by ingress/exchange.py."""
    tenant: Tenant = request.state.tenant
    return tenant


def client_of(request: Request) -> str:
    """The tenant's name where API keys are configured, else the client's address."""
    client: str = request.state.client
    return client


def span_of(request: Request) -> Span | None:
    """The request's span; None if it is not traced."""
    span: Span | None = request.scope["state"].get(SPAN)
    return span


class Routes:
    """What routes use, set by CfgRouter.

    It inherits the routes, because Serve binds a route to the class that inherits its method.
    """

    _args: AppArgs
    _bodies: Bodies
    _encoders: Encoders
    _gate: Gate
    _generators: Generators
    _open_requests: OpenRequests

    async def _generator_of(self, name: object, tenant: Tenant) -> GeneratorClient:
        """The generator that a request means, which the tenant may use.

        name: the body's `model`. Only with a single generator may it be left out.

        Raises RequestError if no generator is meant, UnknownModelError, PermissionDeniedError.
        """
        if not self._generators or name in self._encoders:
            raise await self._encoders.no_generation(name)
        if name:
            self._gate.allow_model(tenant, str(name))
        generator = await self._generators.find(name)
        if generator is None:
            raise self._not_meant(name)
        self._gate.allow_model(tenant, str(name or generator.model_name))
        return generator

    def _not_meant(self, name: object) -> CfgServeError:
        """The error for a request that means none of several generators."""
        if not name:
            names = ", ".join(self._args.generator_names)
            return RequestError(f"model is missing: name one of {names}.", "model")
        return self._encoders.unknown(name)
