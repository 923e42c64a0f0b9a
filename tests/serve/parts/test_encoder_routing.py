"""Which replica of an encoder gets a request, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cfg_core.prefill_only import EngineOptions
from deployments.routing.serve_routers import QUEUED_TOKENS, QueuedTokensRouter
from tools.serving.process import shipped_config


def replica(name: str, queued_tokens: int | None = None) -> Any:
    stats = {} if queued_tokens is None else {QUEUED_TOKENS: queued_tokens}
    return SimpleNamespace(replica_id=name, routing_stats=stats)


def routed(router: Any, request: str, name: str, num_tokens: int) -> None:
    metadata = SimpleNamespace(internal_request_id=request)
    router.on_request_routed(
        SimpleNamespace(args=[SimpleNamespace(num_tokens=num_tokens)], metadata=metadata),
        name,
        None,
    )


async def test_the_router_ranks_by_tokens_then_by_requests() -> None:
    router: Any = QueuedTokensRouter.__new__(QueuedTokensRouter)
    router.initialize_state()
    router._replica_queue_len_cache = {"a": 3, "b": 1}

    async def ranks(*replicas: Any) -> list[str]:
        return [r.replica_id for (r,) in await router.choose_replicas(list(replicas))]

    assert await ranks(replica("a"), replica("b")) == [
        "b",
        "a",
    ]  # only the number of requests is known
    assert await ranks(replica("a", 10), replica("b", 5000)) == ["a", "b"]  # by reported tokens
    routed(router, "1", "a", 9000)  # tokens that were routed after the report count too
    assert await ranks(replica("a", 10), replica("b", 5000)) == ["b", "a"]
    router.on_request_completed("a", "1")
    assert await ranks(replica("a", 10), replica("b", 5000)) == ["a", "b"]


def test_engine_options_of_the_shipped_configs() -> None:
    for name in ("cfg", "stories", "embeddings"):
        for encoder in shipped_config(name)["applications"][0]["args"]["encoders"]:
            EngineOptions.from_mapping(encoder.get("engine", {}))
