"""The playground: pages on which people see what guidance does to each token.

The pages are files of this package. They call this server's own API and no other host, so they work
without a network.
"""

# No `from __future__ import annotations`, and the class comes last: see ingress/app.py.

from pathlib import Path

from fastapi import Request
from fastapi.responses import FileResponse, RedirectResponse, Response

from cfg_core.errors import NotFoundError
from deployments.ingress.app import app

FOLDER = Path(__file__).parents[1] / "playground"
PAGES = {"": "index.html", "chat": "chat.html", "encoders": "encoders.html"}
"""The file of each page, by the end of its path after /playground/."""

TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a new version of the server comes with a new page
}


def page_file(name: str) -> Response:
    """The answer with a file of the playground. Raises NotFoundError if it has no such file."""
    files = {file.name: file for file in FOLDER.iterdir()}
    is_page = name in PAGES
    path = files.get(PAGES.get(name, name))
    if path is None or (path.suffix == ".html" and not is_page):
        raise NotFoundError(f"The playground has no page or file {name[:100]}.")
    return FileResponse(path, media_type=TYPES.get(path.suffix), headers=HEADERS)


class PlaygroundRoutes:
    """Routes of the playground. They need no API key; the requests that the pages send do."""

    @app.get("/", include_in_schema=False)
    async def root(self, request: Request) -> Response:
        """Lead to the playground."""
        return RedirectResponse(f"{request.scope.get('root_path', '').rstrip('/')}/playground")

    @app.get("/playground", include_in_schema=False)
    async def playground(self) -> Response:
        """Return the page for text."""
        return page_file("")

    @app.get("/playground/{name}", include_in_schema=False)
    async def playground_file(self, name: str) -> Response:
        """Return another page, or a file that the pages need."""
        return page_file(name)
