"""Our routes beside those of `vllm serve`, of the installed version."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

DOC = (Path(__file__).parents[2] / "docs" / "routes.md").read_text()
PAGES = {
    "/",
    "/playground",
    "/playground/{name}",
    "/docs",
    "/docs/{name}",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
}
"""The pages of the documentation, and what they load."""
OF_SOME_VERSIONS = {("POST", "/v1/decisions")}
"""Routes that are left out, and that not every tested version of vLLM has."""
ROUTE = re.compile(r"`((?:GET|POST|DELETE) )?(/[\w/{}.:]*)`")


def routes_of(routes: list[Any]) -> Iterator[tuple[str, str]]:
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from routes_of(inner.routes)
        elif isinstance(route, Route | APIRoute):
            yield from ((method, route.path) for method in route.methods - {"HEAD"})


@pytest.fixture(scope="module")
def stock() -> set[tuple[str, str]]:
    """The routes of `vllm serve` for a model that generates text, with adapters loaded at run time.

    The pages of the documentation are not among them.
    """
    from vllm.entrypoints.launchers.app import build_app

    from cfg_core.vllm_plugin import versions

    args = Namespace(**vars(versions.chosen().frontend_args({})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        app = build_app(args, ("generate",))
    return {route for route in routes_of(app.routes) if route[1] not in PAGES}


@pytest.fixture(scope="module")
def ours() -> set[tuple[str, str]]:
    import deployments.ingress.router  # noqa: F401  # it adds the routes
    from deployments.ingress.app import app

    return set(routes_of(app.routes))


def documented(text: str) -> set[tuple[str, str]]:
    """The routes in the tables of a text; a path without a method has that of the one before."""
    found, method = set(), "GET"
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        for given, path in ROUTE.findall(line.split("|")[1]):
            method = given.strip() or method
            found.add((method, path))
    return found


def split() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    served, _, left_out = DOC.partition("These routes of `vllm serve` are left out")
    return documented(served), documented(left_out)


def test_every_route_of_vllm_is_served_or_left_out_with_a_reason(
    stock: set[tuple[str, str]], ours: set[tuple[str, str]]
) -> None:
    _, left_out = split()
    assert stock - ours - left_out == set()
    assert left_out & ours == set()
    assert left_out - stock - OF_SOME_VERSIONS == set()


def test_the_documented_routes_are_ours(ours: set[tuple[str, str]]) -> None:
    served, _ = split()
    pings = {("GET", "/ping"), ("POST", "/ping")}
    assert served - pings <= ours
    assert {route for route in ours if route[1] not in PAGES} - pings <= served
