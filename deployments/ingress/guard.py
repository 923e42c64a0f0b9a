"""What every HTTP request passes before the routes: its id, its key, its bounds, and one line in
the log.

Bounds: the size of its body and the time in which it arrives (limits.py), how much its client holds
at once, and for how long the client may leave its answer unread.

Serve pickles the FastAPI app when CfgRouter's class is made, and each replica unpickles a copy that
CfgRouter.__init__ cannot reach. So the app holds a function, `current_policy`, which pickles by its
name and reads this module in the replica's own process; `enforce` sets what it returns. To wire:

    install(app)                           http_app.py, where the app is made
    enforce(Policy.of(args.access))        CfgRouter.__init__; args.access is resolved

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
    """Put Guard in front of `app`, for Ray Serve. Call it after other middlewares are added: the
    last is outermost."""
    app.add_middleware(Guard, policy=current_policy, behind_serve=True)


class Guard:
    """ASGI middleware. Bodies and answers pass chunk by chunk, and the client's disconnect arrives
    as it was sent.

    For the app it sets `state.request_id`, `state.tenant` (ANONYMOUS on open paths) and
    `state.client` (see limits.py), and makes the request's `x-request-id` header that id. What it
    refuses itself is told in OpenAI's shape. Websockets are refused: no route here is one, and they
    would pass without a key.

    `behind_serve`: Serve's proxy adds to each response the `x-request-id` that it sent here, so
    that one is not added a second time. (If it was ill-formed the response carries both, the
    proxy's and the one that counts.)
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
            exchange = Exchange(scope, receive, send, self._policy(), self._behind_serve, self._now)
            await exchange.run(self._app)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no websockets here"})
        else:
            await self._app(scope, receive, send)
