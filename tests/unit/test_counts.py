"""What replicas report for /metrics: totals never fall, and numbers of now follow the replicas."""

from types import SimpleNamespace

from deployments.ingress import metric_families
from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import CHUNK_TOKENS, Prefix
from deployments.routing import counts as module
from deployments.routing.counts import (
    ENCODER,
    GENERATOR,
    ReplicaCounts,
    ReportKeys,
    generator_metrics,
)
from deployments.routing.placer import Placer

NAMES = ReportKeys(now=("groups",), totals=("guided_tokens",))


def report(groups, guided_tokens):
    return {"groups": groups, "guided_tokens": guided_tokens}


def test_a_replica_that_leaves_takes_only_its_numbers_of_now_along():
    counts = ReplicaCounts(NAMES)
    counts.update({"a": report(1, 10), "b": report(2, 20)})
    assert counts.now() == {"groups": {"a": 1, "b": 2}}
    assert counts.totals() == {"guided_tokens": 30}
    counts.update({"b": report(3, 25)})
    assert counts.now() == {"groups": {"b": 3}}
    assert counts.totals() == {"guided_tokens": 35}
    counts.left("b")
    assert counts.now() == {"groups": {}}
    assert counts.totals() == {"guided_tokens": 35}


def test_a_replica_that_comes_back_is_not_counted_twice():
    counts = ReplicaCounts(NAMES)
    counts.update({"a": report(1, 10)})
    counts.update({})
    counts.update({"a": {}})
    assert counts.totals() == {"guided_tokens": 10}
    assert counts.now() == {"groups": {"a": 1}}
    counts.update({"a": report(1, 12)})
    assert counts.totals() == {"guided_tokens": 12}


def test_the_oldest_of_many_that_left_are_one_sum(monkeypatch):
    monkeypatch.setattr(module, "MAX_GONE", 3)
    counts = ReplicaCounts(NAMES)
    for i in range(10):
        counts.update({i: report(1, 1), "stays": report(1, 100)})
    assert len(counts._reports) == 5
    assert counts.totals() == {"guided_tokens": 110}


def test_odd_values_count_as_0():
    counts = ReplicaCounts(NAMES)
    counts.update({"a": {"groups": -1, "guided_tokens": "x"}, "b": report(2, 3)})
    assert counts.totals() == {"guided_tokens": 3}
    assert counts.now() == {"groups": {"a": 0, "b": 2}}


def test_replicas_have_the_names_that_serve_shows():
    counts = ReplicaCounts(NAMES)
    counts.update({SimpleNamespaceKey(unique_id="r1"): report(1, 1)})
    assert counts.now() == {"groups": {"r1": 1}}


class SimpleNamespaceKey(SimpleNamespace):
    __hash__ = object.__hash__


def test_every_count_has_a_metric_of_its_kind():
    kinds = {family.name: family.kind for family in metric_families.READ}
    now = {name: {"r": 1} for name in GENERATOR.now}
    told = generator_metrics(now, dict.fromkeys(GENERATOR.totals, 1))
    for name, value in told.items():
        assert kinds[name] == ("gauge" if value == {"r": 1} else "counter"), name
    for name in ENCODER.now:
        assert kinds[f"encoder_{name}"] == "gauge"
    for name in ENCODER.totals:
        assert kinds[f"encoder_{name}"] == "counter"


def request(session=None, chain=(b"a",)):
    return GroupRequest(
        prefixes=(Prefix(chain, CHUNK_TOKENS * len(chain)),), output_tokens=10, session=session
    )


def test_a_placement_has_a_reason():
    placer = Placer(seed=0)
    placer.keep_only(["r1"])
    assert placer.sent("1", request(), "r1", 0.0) == "only"
    placer.keep_only(["r1", "r2"])
    assert placer.sent("2", request(), "r1", 0.0) == "prefix"
    assert placer.sent("3", request(), "r2", 0.0) == "load"
    assert placer.sent("4", request("s", (b"b",)), "r2", 0.0) == "load"
    assert placer.sent("5", request("s", (b"b",)), "r2", 0.0) == "session"
    assert placer.sent("6", request("s", (b"b",)), "r1", 0.0) == "load"
    assert placer.sent("7", request(), "gone", 0.0) is None


def test_the_reason_is_that_of_the_choice():
    """What others sent between the choice and the first item does not change it."""
    placer = Placer(seed=0)
    placer.keep_only(["r1", "r2"])
    first, second = (placer.rank(name, request(), ["r1"], 0.0)[0] for name in "12")
    assert placer.sent("1", request(), first, 1.0) == "load"
    assert placer.sent("2", request(), second, 1.0) == "load"
    assert placer.sent("3", request(), placer.rank("3", request(), ["r1"], 1.0)[0], 1.0) == "prefix"
    placer.rank("4", request(), ["r1"], 1.0)
    assert placer.sent("4", request(), "r2", 1.0) == "load"  # r1 had no room for it
