"""The FastAPI application that CfgRouter's routes hang on: how errors are told, what is read of a request."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the handlers.

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from cfg_core.errors import CfgServeError
from deployments import own_headers
from deployments.access import ANONYMOUS, Tenant
from deployments.http_errors import error_body, http_error
from deployments.http_guard import install

FORWARDED_HEADERS = ("x-request-id", "x-session-id", "traceparent", "tracestate")
"""Headers that vLLM's serving classes read; nothing else of the client's leaves the ingress."""

app = FastAPI(title="cfg-serve", description="OpenAI-compatible API with classifier-free guidance.")
install(app)


@app.exception_handler(CfgServeError)
async def _on_own_error(request: Request, error: CfgServeError) -> JSONResponse:
    answer = http_error(error)
    return JSONResponse(answer.body, answer.status, answer.headers)


@app.exception_handler(HTTPException)
async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Unknown paths and wrong methods, in OpenAI's shape."""
    body = error_body(
        f"{request.method} {request.url.path}: {error.detail}.", error.status_code, "invalid_request_error"
    )
    return JSONResponse(body, error.status_code, error.headers)


def forwarded(request: Request, share_prefixes: bool = True) -> dict[str, str]:
    """What a replica is told of a request beside its body. share_prefixes: see AppArgs."""
    headers = {name: value for name in FORWARDED_HEADERS if (value := request.headers.get(name)) is not None}
    headers[own_headers.CLIENT] = client_of(request)
    tenant = tenant_of(request)
    if tenant is not ANONYMOUS and not share_prefixes:
        headers[own_headers.TENANT] = tenant.name
    return headers


def tenant_of(request: Request) -> Tenant:
    """Whom the request is counted for (http_guard.py)."""
    tenant: Tenant = request.state.tenant
    return tenant


def client_of(request: Request) -> str:
    """The tenant's name where keys are configured, else the client's address (http_guard.py)."""
    client: str = request.state.client
    return client


def json_text(text: str) -> Response:
    return Response(text, media_type="application/json")
