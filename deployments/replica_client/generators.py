"""The generators as CfgRouter sees them: which one a request means, and what all of them say.

What belongs to one generator (its handle, queue, replicas and limits) is in its GeneratorClient.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from cfg_core.errors import CfgServeError, EngineDeadError
from deployments.config.args import AppArgs
from deployments.replica_client.generator import GeneratorClient, Reading


class Generators:
    """The clients of the generators, by served name.

    Used from one event loop.

    handles: of the ModelReplica deployments, by served name.
    waited: called with a generator's name and what GeneratorClient tells.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle[Any]],
        args: AppArgs,
        waited: Callable[[str, float], None] = lambda model, seconds: None,
    ) -> None:
        self._clients = {
            name: GeneratorClient(handles[name], own, partial(waited, name))
            for name, own in zip(args.generator_names, args.generators, strict=True)
        }
        self._by_name = {
            name: client for client in self for name in (client.model_name, *client.args.adapters)
        }

    def __iter__(self) -> Iterator[GeneratorClient]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return len(self._clients)

    # --- choosing ---------------------------------------------------------------------------------

    def named(self, name: object) -> GeneratorClient | None:
        """The generator that the configuration serves by this name, for itself or an adapter.

        The only generator is meant by every name, because its engine may know more than the
        configuration: adapters that were loaded while it runs.
        """
        if len(self) == 1:
            return next(iter(self))
        return self._by_name.get(name) if isinstance(name, str) else None

    async def find(self, name: object) -> GeneratorClient | None:
        """The generator that a request means; None if there is no such name.

        A name that the configuration does not have may be that of an adapter that was loaded while
        an engine runs. Only engines that run and may have adapters are asked for it.
        """
        if (found := self.named(name)) is not None or not isinstance(name, str) or not name:
            return found
        able = [one for one in self if one.args.engine.get("enable_lora") and not one.asleep]
        lists = await asyncio.gather(*map(_cards, able))
        return next(
            (
                one
                for one, cards in zip(able, lists, strict=True)
                if any(card["id"] == name for card in cards)
            ),
            None,
        )

    # --- all of them ------------------------------------------------------------------------------

    async def cards(self, created: int) -> list[dict[str, Any]]:
        """The entries of the generators and their adapters in /v1/models."""

        async def of_one(client: GeneratorClient) -> list[dict[str, Any]]:
            return _configured(client.args, created) if client.asleep else await _cards(client)

        lists = await asyncio.gather(*map(of_one, self))
        return [card for cards in lists for card in cards]

    async def states(self) -> dict[str, Any]:
        """What the engines report, for /ready: `engine` of the only one, else `engines` by name.

        Raises EngineDeadError with the name of a generator that does not answer.
        """
        if not self._clients:
            return {}
        states = await asyncio.gather(*map(self._state, self))
        if len(self) == 1:
            return {"engine": states[0]}
        return {"engines": dict(zip(self._clients, states, strict=True))}

    async def _state(self, client: GeneratorClient) -> dict[str, int]:
        if client.asleep:
            return {"replicas": 0}
        try:
            async with asyncio.timeout(client.args.ready_timeout_s):
                return await client.state()
        except (CfgServeError, TimeoutError) as error:
            reason = str(error) or "the engine did not answer in time"
            whose = f"{client.model_name}: " if len(self) > 1 else ""
            raise EngineDeadError(f"{whose}{reason}") from None

    async def schemas(self) -> dict[str, Any] | None:
        """The schemas of vLLM's bodies, the same for all; None if every generator is asleep."""
        for client in self:
            if not client.asleep:
                schemas: dict[str, Any] = json.loads(await client.ask("schemas"))
                return schemas
        return None

    def readings(self) -> dict[str, Reading]:
        """Values for /metrics by the name of the generator; the only one needs no name."""
        is_only = len(self) == 1
        return {"" if is_only else name: one.reading() for name, one in self._clients.items()}


async def _cards(client: GeneratorClient) -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = json.loads(await client.ask("models"))["data"]
    return cards


def _configured(args: AppArgs, created: int) -> list[dict[str, Any]]:
    """The entries of a generator that is asleep, which is not asked: that would wake it."""
    base: dict[str, Any] = {
        "id": args.model_name,
        "object": "model",
        "created": created,
        "owned_by": "cfg-serve",
        "root": args.model_name,
        "parent": None,
    }
    return [
        base,
        *({**base, "id": name, "root": name, "parent": args.model_name} for name in args.adapters),
    ]
