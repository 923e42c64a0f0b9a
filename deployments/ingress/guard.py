"""The ASGI middleware that every HTTP request passes before it reaches the routes.

It gives the request an id, checks which name and which web page it comes by (sites.py), its API key
and its limits (config/access.py, config/limits.py), and writes one line to the log.

Serve pickles the FastAPI app when it makes CfgRouter's class. Each replica unpickles a copy of the
app, which CfgRouter.__init__ cannot reach. The app therefore holds a function, `current_policy`
(ingress/policy.py). It is pickled by name, and returns what `enforce` has set in the replica's own
process. To wire:

    install(app)             ingress/app.py, where the app is made
    enforce(Policy.of(...))  CfgRouter.__init__, with the resolved args.access

Imports neither ray, vllm nor torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.exchange import Exchange
from deployments.ingress.policy import Policy, current_policy


def install(app: FastAPI) -> None:
    """Add Guard to `app`, for Ray Serve. It must be the last one added, which is the outermost."""
    app.add_middleware(Guard, policy=current_policy, behind_serve=True)


class Guard:
    """ASGI middleware that identifies, limits and logs each request.

    Guard sets `state.request_id`, `state.tenant` (ANONYMOUS on open paths) and `state.client` (the
    tenant's name where API keys are configured, else the client's address). It replaces the
    request's `x-request-id` header by that id. It refuses websockets, because no route is one, and
    they would pass without an API key.

    behind_serve: Serve's proxy adds to each response the `x-request-id` that it sent here, so Guard
    does not add it again. If that id was ill-formed, the response carries two ids: the proxy's, and
    Guard's, which is the one that counts.
    """

    def __init__(
        self,
        app: ASGIApp,
        policy: Callable[[], Policy],
        behind_serve: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._policy = policy
        self._behind_serve = behind_serve
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            policy = self._policy()
            if policy.forwarded is not None:
                await policy.forwarded(scope, receive, send)  # it changes the scope's client
            exchange = Exchange(scope, receive, send, policy, self._behind_serve, self._now)
            await exchange.run(self._app)
        elif scope["type"] == "websocket":
            await send(
                {"type": "websocket.close", "code": 1008, "reason": "WebSockets are not supported"}
            )
        else:
            await self._app(scope, receive, send)
