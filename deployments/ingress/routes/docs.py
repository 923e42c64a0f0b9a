"""/openapi.json, and the page at /docs that shows it, without any other host."""

# No `from __future__ import annotations`, and the class comes last: see ingress/app.py.

import base64
import importlib.util
import json
import re
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, Response

from cfg_core.errors import NotFoundError
from deployments.ingress.app import Routes, app
from deployments.ingress.openapi.document import document

STATIC = "entrypoints/serve/instrumentator/static"
"""Where vLLM's package has the files of Swagger UI."""

KEY = {"type": "http", "scheme": "bearer", "description": "An API key of this server."}

FILES = ("swagger-ui-bundle.js", "swagger-ui.css")


def swagger_file(name: str) -> Path | None:
    """A file of Swagger UI in the installed vLLM, which is not imported; None if it has none."""
    return _installed(name) if name in FILES else None


@cache
def _installed(name: str) -> Path | None:
    spec = importlib.util.find_spec("vllm")
    roots = (spec.submodule_search_locations or ()) if spec is not None else ()
    paths = (Path(root, STATIC, name) for root in roots)
    return next((path for path in paths if path.is_file()), None)


def page() -> Response:
    """The page, with a policy that lets it run its own script and call this server only.

    The script that FastAPI writes into the page is allowed by its digest. Swagger UI sets styles of
    elements.
    """
    made = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="cfg-serve",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    scripts = re.findall(rb"<script>(.*?)</script>", bytes(made.body), re.DOTALL)
    digests = [base64.b64encode(sha256(script).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    made.headers["content-security-policy"] = (
        f"default-src 'none'; script-src 'self' {allowed}; style-src 'self' 'unsafe-inline';"
        " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return made


class DocsRoutes(Routes):
    _document: bytes | None = None

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document.

        The schemas of vLLM's bodies are asked of a replica, once; while all generators are asleep,
        the document lacks them. Everybody may read the document.
        Not everybody may know the models, so with API keys it names none.

        The routes are those of the request's app. This module's `app` lacks the ones of classes
        that Serve pickled by value, unless somebody imports their modules.
        """
        if self._document is None:
            engine = await self._generators.schemas()
            models = {"generator": next(iter(self._args.generator_names), "")}
            models["encoder"] = next(iter(self._encoders.names), "")
            needs_key = bool(self._args.access.keys)
            made = document(request.app.routes, engine, {} if needs_key else models)
            if needs_key:
                made["security"] = [{"key": []}]
                made["components"]["securitySchemes"] = {"key": KEY}
            text = json.dumps(made, separators=(",", ":")).encode()
            if engine is None and self._generators:
                return Response(text, media_type="application/json")  # all are asleep
            self._document = text
        return Response(self._document, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs(self) -> Response:
        """Return a page on which requests can be tried."""
        return page()

    @app.get("/docs/{name}", include_in_schema=False)
    async def docs_file(self, name: str) -> Response:
        """Return a file of the page."""
        path = swagger_file(name)
        if path is None:
            raise NotFoundError(f"The page has no file {name[:100]}.")
        return FileResponse(path)
