"""Which of several generators a request means, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cfg_core.errors import EngineDeadError
from deployments import app
from deployments.config.args import AppArgs
from deployments.replica_client.generators import Generators
from deployments.routing import fleets
from deployments.routing.loads import ReplicaLoad
from tools.serving.process import Json

LORA: Json = {"engine": {"enable_lora": True}}
STATE = {"total_blocks": 5}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_fleets", {})


class Replica:
    """Stands in for a deployment: it answers at once, with its name and the adapters given.

    hangs: it never answers. asked: which methods were called.
    """

    def __init__(self, name: str, adapters: Sequence[str] = (), hangs: bool = False) -> None:
        self.deployment_name = name
        self.asked: list[str] = []
        self._names, self._hangs = [name, *adapters], hangs
        self.ask = SimpleNamespace(remote=self._ask)
        self.engine_state = SimpleNamespace(remote=lambda: self._answer("state", STATE))

    def options(self, **_: object) -> Replica:
        return self

    def _ask(self, method: str) -> Any:
        cards = [{"id": name} for name in self._names]
        answers = {"models": {"data": cards}, "schemas": {"of": self.deployment_name}}
        return self._answer(method, json.dumps(answers[method]))

    def _answer(self, method: str, value: Any) -> asyncio.Future[Any]:
        self.asked.append(method)
        answer = asyncio.get_running_loop().create_future()
        if not self._hangs:
            answer.set_result(value)
        return answer


def generators(*replicas: Replica, own: Sequence[Json] = (), **shared: Any) -> Generators:
    """One generator for each replica, with its name. own: further keys of each."""
    keys = own or [{}] * len(replicas)
    models = [
        {"model": f"org/{replica.deployment_name}", "deployment": replica.deployment_name, **more}
        for replica, more in zip(replicas, keys, strict=True)
    ]
    args = AppArgs.model_validate({"models": models, **shared})
    handles: Any = {replica.deployment_name: replica for replica in replicas}
    return Generators(handles, args)


async def found(several: Generators, name: object) -> str | None:
    client = await several.find(name)
    return None if client is None else client.model_name


ADAPTER: Json = {
    "engine": {"enable_lora": True},
    "frontend": {"lora_modules": [{"name": "style", "path": "p"}]},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a", "a"), ("b", "b"), ("style", "b"), ("c", None), ("", None), (None, None), (["a"], None)],
    ids=str,
)
def test_the_name_chooses(name: object, expected: str | None) -> None:
    several = generators(Replica("a"), Replica("b"), own=[{}, ADAPTER])
    assert asyncio.run(found(several, name)) == expected


@pytest.mark.parametrize("name", ["a", "an-adapter-of-its-engine", None, 7])
def test_the_only_one_is_meant_by_every_name(name: object) -> None:
    replica = Replica("a")
    assert asyncio.run(found(generators(replica), name)) == "a"
    assert not replica.asked


def test_an_adapter_that_was_loaded_later_is_looked_for_where_there_may_be_one() -> None:
    replicas = Replica("a"), Replica("b", ["x"]), Replica("c", ["y"]), Replica("d", ["z"])
    sleeping = {**LORA, "scales_to_zero": True}
    several = generators(*replicas, own=[{}, LORA, LORA, sleeping])
    assert asyncio.run(found(several, "y")) == "c"
    assert asyncio.run(found(several, "z")) is None
    assert [len(replica.asked) for replica in replicas] == [0, 2, 2, 0]


def test_one_that_is_asleep_is_listed_and_not_asked() -> None:
    sleeping = {**ADAPTER, "scales_to_zero": True}
    replicas = Replica("a"), Replica("b")
    several = generators(*replicas, own=[{}, sleeping])
    cards = asyncio.run(several.cards(created=3))
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("a", None),
        ("b", None),
        ("style", "b"),
    ]
    assert asyncio.run(several.states()) == {"engines": {"a": STATE, "b": {"replicas": 0}}}
    assert asyncio.run(several.schemas()) == {"of": "a"}
    assert not replicas[1].asked
    assert "replicas" not in several.readings()["b"]
    fleets.generator_fleet("b").update([ReplicaLoad()])
    assert asyncio.run(several.states()) == {"engines": {"a": STATE, "b": STATE}}
    assert several.readings()["b"]["replicas"] == 1
    assert len(asyncio.run(several.cards(created=3))) == 2


def test_nobody_is_asked_for_schemas_while_all_are_asleep() -> None:
    several = generators(Replica("a"), own=[{"scales_to_zero": True}])
    assert asyncio.run(several.schemas()) is None


def test_the_state_of_the_only_one_has_no_name() -> None:
    several = generators(Replica("a"))
    assert asyncio.run(several.states()) == {"engine": STATE}
    assert list(several.readings()) == [""]
    none = AppArgs.model_validate({"encoders": [{"model": "org/e"}]})
    assert asyncio.run(Generators({}, none).states()) == {}


def test_one_that_does_not_answer_is_named() -> None:
    several = generators(Replica("a"), Replica("b", hangs=True), ready_timeout_s=0.05)
    with pytest.raises(EngineDeadError, match=r"^b: the engine did not answer in time"):
        asyncio.run(several.states())
    alone = generators(Replica("b", hangs=True), ready_timeout_s=0.05)
    with pytest.raises(EngineDeadError, match=r"^the engine did not answer in time"):
        asyncio.run(alone.states())


def test_each_has_a_queue_of_its_own() -> None:
    sizes: list[Json] = [{"engine": {"max_num_seqs": 4}}, {"admission": {"streams_per_replica": 3}}]
    first, second = generators(Replica("a"), Replica("b"), own=sizes)
    assert first.queue is not second.queue
    assert (first.capacity(), second.capacity()) == (5, 3)


def test_the_application_has_a_deployment_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    args = AppArgs.model_validate(
        {
            "models": [{"model": "org/a"}, {"model": "org/b", "deployment": "Second"}],
            "encoders": [{"model": "org/e"}],
        }
    )
    router: Any = app.build(args)._bound_deployment
    bound, encoders, given = router.init_args
    names = {name: part._bound_deployment.name for name, part in (bound | encoders).items()}
    assert names == {"a": "ModelReplica", "b": "Second", "e": "Embedder"}
    own = bound["b"]._bound_deployment.init_args[0]
    assert (own.model_name, own.models) == ("b", ())
    assert given.served_names == ["a", "b", "e"]
