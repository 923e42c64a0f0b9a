"""The encoders as CfgRouter sees them: which one a request means, its queue, and calls to it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cfg_core.errors import EngineDeadError, RequestError, UnknownModelError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from deployments.admission.encoder_queue import TOLD, EncoderQueue
from deployments.admission.entries import Share
from deployments.config.args import AppArgs
from deployments.config.encoders import EncoderArgs
from deployments.replica_client.serve_calls import value_of
from deployments.requests.body import json_type
from deployments.requests.encode.capabilities import (
    PATHS,
    EncodeEndpoint,
    can_serve,
    cannot_serve,
    paths_of,
)
from deployments.routing.fleets import encoder_fleet

RETRY_DELAY_S = 1.0
"""Seconds before a retry: more than a replica survives its engine (health/engine_watch.py).

A retry therefore does not reach the same replica.
"""

GENERATOR_PATHS = "/v1/completions or /v1/chat/completions"


class Encoders:
    """Handles of the encoders' deployments, by served name.

    Used from one event loop. Each encoder is asked only once what its model can do.

    args: names all models that are served, and says how long to wait for an encoder's answer.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]], args: AppArgs) -> None:
        self._handles = dict(handles)
        self._args = args
        self._encoder_args = {encoder.model_name: encoder for encoder in args.encoders}
        self._fleets = {
            name: encoder_fleet(handle.deployment_name) for name, handle in handles.items()
        }
        self._infos: dict[str, ModelInfo] = {}
        self._queues: dict[str, EncoderQueue] = {}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._handles

    @property
    def names(self) -> list[str]:
        return list(self._handles)

    # --- choosing ---------------------------------------------------------------------------------

    async def choose(self, endpoint: EncodeEndpoint, name: object) -> tuple[str, ModelInfo]:
        """Return the name and the info of the encoder that a request means.

        name: the body's `model`; None means the only encoder that can serve the endpoint.

        Raises UnknownModelError, or RequestError that says which model or endpoint to use.
        """
        path = PATHS[endpoint]
        if name is None:
            return await self._only_one(endpoint)
        name = self.known(name)
        if name not in self:
            able = await self._able(endpoint)
            instead = (
                f"for {path} use {', '.join(able)}" if able else f"no model here serves {path}"
            )
            raise RequestError(
                f"{name} generates text: use it with {GENERATOR_PATHS}; {instead}.", "model"
            )
        info = await self.info(name)
        if not can_serve(info, endpoint):
            raise cannot_serve(name, info, endpoint)
        return name, info

    async def can_serve(self, endpoint: EncodeEndpoint, name: object) -> bool:
        """Whether the encoder of this name can, or any one if `name` is None."""
        able = await self._able(endpoint)
        return bool(able) if name is None else name in able

    async def _only_one(self, endpoint: EncodeEndpoint) -> tuple[str, ModelInfo]:
        able = await self._able(endpoint)
        if len(able) == 1:
            return able[0], await self.info(able[0])
        if able:
            raise RequestError(f"model is missing: name one of {', '.join(able)}.", "model")
        raise RequestError(
            f"no model here serves {PATHS[endpoint]}: see what each can do in /v1/models.", "model"
        )

    async def _able(self, endpoint: EncodeEndpoint) -> list[str]:
        infos = await asyncio.gather(*map(self.info, self.names))
        return [
            name for name, info in zip(self.names, infos, strict=True) if can_serve(info, endpoint)
        ]

    def known(self, name: object) -> str:
        """Return `name` if a model of this name is served here.

        Raises UnknownModelError if none is, and RequestError if `name` is not a string.
        """
        if not isinstance(name, str) or name not in self._args.served_names:
            raise self.unknown(name)
        return name

    def unknown(self, name: object) -> RequestError:
        """The error for a name that no model here has: RequestError if it is not even a string."""
        if not isinstance(name, str):
            return RequestError(f"model is {json_type(name)}: send the name of a model.", "model")
        return UnknownModelError(
            f"The model `{name[:100]}` does not exist: use {', '.join(self._args.served_names)}.",
            "model",
        )

    async def no_generation(self, name: object) -> RequestError:
        """The error for a request for generated text that names an encoder, or no model at all.

        Raises UnknownModelError if nothing of that name is served.
        """
        name = self.known(self.names[0] if name is None else name)
        info = await self.info(name)
        generators = " or ".join(self._args.generator_names)
        instead = f"generate with {generators}" if generators else "no model here generates text"
        paths = ", ".join(paths_of(info))
        return RequestError(f"{name} is an encoder: use it with {paths}; {instead}.", "model")

    # --- calling ----------------------------------------------------------------------------------

    async def info(self, name: str) -> ModelInfo:
        if name not in self._infos:
            self._infos[name] = await self._in_time(name, "info")
        return self._infos[name]

    def args(self, name: str) -> EncoderArgs:
        """The entry of `encoders:` in the YAML of encoder `name`."""
        return self._encoder_args[name]

    async def call(self, name: str, share: Share, work: int, method: str, *args: Any) -> Any:
        """Return what a replica of encoder `name` answers, once there is a place for the call.

        work: estimated, in tokens. Raises OverloadedError if too much waits, and other
        CfgServeErrors.
        """
        queue = await self._queue(name)
        place = await queue.enter(share, work)
        try:
            return await self._send(name, method, *args)
        finally:
            place.leave()

    async def _queue(self, name: str) -> EncoderQueue:
        if name not in self._queues:
            info = await self.info(name)
            if name not in self._queues:  # another request may have come first
                self._queues[name] = EncoderQueue(
                    self._encoder_args[name],
                    info,
                    self._args.admission.max_share,
                    lambda: max(1, self._fleets[name].view.replicas),
                )
        return self._queues[name]

    async def _send(self, name: str, method: str, *args: Any) -> Any:
        """Call a replica, and another one if it is lost; computing twice does no harm."""
        for retries_left in reversed(range(self._args.num_retries + 1)):
            try:
                return await value_of(getattr(self._handles[name], method).remote(*args))
            except EngineDeadError:
                if not retries_left:
                    raise
                await asyncio.sleep(RETRY_DELAY_S)

    def reading(self) -> dict[str, Mapping[str, float]]:
        """Values for /metrics: of each encoder, by its name, summed over its replicas."""
        read: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for name, fleet in self._fleets.items():
            counts = fleet.counts
            now = {key: sum(values.values()) for key, values in counts.now().items()}
            for key, value in (now | counts.totals() | {"replicas": fleet.view.replicas}).items():
                read[f"encoder_{key}"][name] = value
            queue = self._queues.get(name)
            for key, value in (queue.stats if queue else dict.fromkeys(TOLD, 0)).items():
                read[f"encoder_admission_{key}"][name] = value
        return dict(read)

    async def states(self) -> dict[str, dict[str, int]]:
        """What a replica of each encoder reports. Raises EngineDeadError if one does not answer."""
        states = await asyncio.gather(*map(self._state, self.names))
        return dict(zip(self.names, states, strict=True))

    async def _state(self, name: str) -> dict[str, int]:
        return {"replicas": 0} if self._asleep(name) else await self._in_time(name, "engine_state")

    def _asleep(self, name: str) -> bool:
        """Whether it is scaled to zero replicas."""
        return self._encoder_args[name].scales_to_zero and not self._fleets[name].view.replicas

    async def cards(self, created: int) -> list[dict[str, Any]]:
        """The entries of the encoders in /v1/models, with the endpoints that each one serves."""
        return [await self._card(name, created) for name in self.names]

    async def _card(self, name: str, created: int) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "cfg-serve",
            "root": name,
        }
        if self._asleep(name) and name not in self._infos:
            return card  # nothing is asked, because that would wake it
        info = await self.info(name)
        return card | {
            "max_model_len": info.max_input_tokens,
            "dimension": info.dimension,
            "dtype": info.dtype,
            "tasks": list(info.tasks),
            "endpoints": paths_of(info),
        }

    async def _in_time(self, name: str, method: str) -> Any:
        try:
            async with asyncio.timeout(None if self._asleep(name) else self._args.ready_timeout_s):
                return await value_of(getattr(self._handles[name], method).remote())
        except (EngineDeadError, TimeoutError) as error:
            raise EngineDeadError(
                f"{name} is not ready: {error or 'it did not answer in time'}"
            ) from None
