"""The batch policy: budget, order, ageing and cancellation, also in random runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.stages.scheduler import Scheduler
from cfg_core.prefill_only.types import RequestOptions, SequenceState

OPTIONS = RequestOptions()


def sequences(*lengths: int, request: object = None) -> list[SequenceState]:
    return [
        SequenceState(range(n), None, OPTIONS, i, request=request) for i, n in enumerate(lengths)
    ]


def scheduler(max_batch_tokens: int = 100, **options: int) -> Scheduler:
    return Scheduler(EngineOptions(**options), max_batch_tokens)


def batches(it: Scheduler) -> list[list[int]]:
    """All batches until the queue is empty, as indices."""
    found = []
    while batch := it.schedule():
        it.check_integrity()
        found.append([s.index for s in batch])
    return found


def test_an_empty_queue_gives_an_empty_batch():
    assert scheduler().schedule() == []


def test_all_that_fits_goes_sorted_by_length():
    it = scheduler()
    it.add(sequences(30, 10, 20))
    assert it.queued_tokens == 60
    assert batches(it) == [[1, 2, 0]]
    assert it.queued_tokens == 0


def test_the_oldest_goes_with_inputs_of_similar_length():
    it = scheduler(60)
    it.add(sequences(20, 50, 19, 50, 21))
    assert batches(it) == [[2, 0, 4], [1], [3]]


def test_never_more_than_the_budget_or_the_number():
    it = scheduler(100, max_batch_sequences=2)
    it.add(sequences(10, 10, 10))
    assert batches(it) == [[0, 1], [2]]


def test_only_the_window_is_looked_at():
    it = scheduler(60, sort_window=2)
    it.add(sequences(30, 60, 30))
    assert batches(it) == [[0], [1], [2]]


@pytest.mark.parametrize(("max_skips", "batch_of_the_odd_one"), [(1, 1), (8, 2)])
def test_one_that_was_passed_over_goes_before_better_matches(max_skips, batch_of_the_odd_one):
    it = scheduler(100, max_skips=max_skips)
    it.add(sequences(50, 45, 30, *[50] * 6))
    assert 2 in batches(it)[batch_of_the_odd_one]


def test_cancelled_inputs_leave_the_queue():
    it = scheduler()
    many = sequences(10, 20, 30)
    it.add(many)
    it.cancel([many[1]])
    assert it.queued_tokens == 40
    assert batches(it) == [[0, 2]]
    it.cancel(many)  # cancelling inputs that already ran has no effect
    assert it.queued_sequences == 0


@pytest.mark.parametrize("num_heavy", [1, 5])
@pytest.mark.parametrize("length", [9, 90])
def test_a_small_request_does_not_wait_for_a_large_one(num_heavy, length):
    it = scheduler(1000)
    for heavy in range(num_heavy):
        it.add(sequences(*[60] * 2000, request=heavy))
    for _ in range(5):
        assert len(it.schedule()) == 16
    (small,) = sequences(length, request="small")
    it.add([small])
    assert any(small in it.schedule() for _ in range(num_heavy + 2))
    it.check_integrity()


def test_large_requests_that_come_at_different_times_get_the_same():
    it = scheduler(600)
    it.add(sequences(*[60] * 1000, request="first"))
    for _ in range(20):
        it.schedule()
    it.add(sequences(*[60] * 1000, request="second"))
    got = [s.request for _ in range(50) for s in it.schedule()]
    assert abs(got.count("first") - got.count("second")) <= 10


def test_small_requests_do_not_keep_a_large_one_from_its_turns():
    """The queue is always full of small requests, and the large one still proceeds."""
    it = scheduler(100)
    it.add(sequences(*[50] * 20, request="large"))
    served = 0
    for number in range(1000):
        while it.queued_tokens < 2000:
            it.add(sequences(60, 60, request=(number, it.queued_tokens)))
        served += sum(s.request == "large" for s in it.schedule())
        it.check_integrity()
    assert served == 20


def test_a_cancelled_request_takes_no_turns():
    it = scheduler(100)
    gone = sequences(*[50] * 500, request="gone")
    it.add(gone)
    it.add(sequences(*[50] * 10, request="here"))
    it.schedule()
    it.cancel(gone)
    it.check_integrity()
    assert len(batches(it)) == 5


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    window=st.integers(1, 20),
    max_skips=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_everything_runs_once_and_soon(lengths, window, max_skips, seed):
    it = scheduler(50, sort_window=window, max_skips=max_skips)
    generator = random.Random(seed)
    waiting, ran = sequences(*lengths), []
    for sequence in waiting:
        sequence.request = generator.choice([None, "a", "b"])
    while waiting or it.queued_sequences:
        it.add(waiting[:5])
        del waiting[:5]
        batch = it.schedule()
        it.check_integrity()
        assert sum(map(len, batch)) <= 50
        assert [len(s) for s in batch] == sorted(len(s) for s in batch)
        ran += [s.index for s in batch]
        if generator.random() < 0.1:
            it.check_integrity()
    assert sorted(ran) == list(range(len(lengths)))


@pytest.mark.parametrize(
    "bad", [{"sort_window": 0}, {"max_batch_tokens": 0}, {"num_threads": True}, {"dtype": "int8"}]
)
def test_bad_options(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        EngineOptions(**bad)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(
        ValueError,
        match="unknown key `max_batch_token` in `engine`: did you mean `max_batch_tokens`",
    ):
        EngineOptions.from_mapping({"max_batch_token": 5})


def of_tenant(tenant: str, *lengths: int, request: object = None, weight: float = 1.0):
    made = sequences(*lengths, request=request)
    for sequence in made:
        sequence.tenant, sequence.weight = tenant, weight
    return made


def served(it: Scheduler, num_batches: int) -> dict[str, int]:
    """Tokens of each tenant in the next batches."""
    tokens: dict[str, int] = {}
    for _ in range(num_batches):
        for sequence in it.schedule():
            tokens[sequence.tenant] = tokens.get(sequence.tenant, 0) + len(sequence)
        it.check_integrity()
    return tokens


def test_more_requests_give_a_tenant_no_more():
    it = scheduler(600)
    for number in range(100):
        it.add(of_tenant("many", *[60] * 20, request=number))
    it.add(of_tenant("one", *[60] * 1000, request="one"))
    got = served(it, 100)
    assert abs(got["many"] - got["one"]) <= 2 * 600


def test_tenants_share_by_weight():
    it = scheduler(600)
    it.add(of_tenant("light", *[60] * 2000, request=1))
    it.add(of_tenant("heavy", *[60] * 2000, request=2, weight=3.0))
    got = served(it, 100)
    assert 2.8 < got["heavy"] / got["light"] < 3.2


@pytest.mark.parametrize("length", [9, 90])
def test_a_small_request_of_another_tenant_is_next(length):
    """However many requests a tenant has, and however much it has had before."""
    it = scheduler(1000)
    for number in range(50):
        it.add(of_tenant("full", *[60] * 200, request=number))
    served(it, 20)
    for _ in range(10):
        (small,) = of_tenant("small", length, request="small")
        it.add([small])
        assert small in it.schedule()


def test_an_idle_tenant_saves_up_no_turns():
    it = scheduler(100)
    it.add(of_tenant("late", 50, request="first"))
    it.add(of_tenant("busy", *[50] * 300, request="busy"))
    served(it, 50)
    it.add(of_tenant("late", *[50] * 100, request="second"))
    got = served(it, 20)
    assert abs(got["late"] - got["busy"]) <= 100


def test_requests_of_one_tenant_take_turns_beside_another_tenant():
    it = scheduler(100)
    it.add(of_tenant("a", *[50] * 100, request="large"))
    it.add(of_tenant("b", *[50] * 100, request="other"))
    it.schedule()
    (small,) = of_tenant("a", 50, request="small")
    it.add([small])
    assert any(small in it.schedule() for _ in range(4))


@given(
    sends=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.lists(st.integers(1, 50))),
        max_size=30,
    ),
    seed=st.integers(0, 99),
)
def test_tenants_that_come_cancel_and_go(sends, seed):
    it, generator = scheduler(50, sort_window=8, max_skips=2), random.Random(seed)
    waiting, ran = [], []
    for tenant, request, lengths in sends:
        added = of_tenant(tenant, *lengths, request=request, weight=generator.choice([0.5, 1, 4]))
        it.add(added)
        waiting += added
        ran += it.schedule()
        if waiting and generator.random() < 0.2:
            it.cancel(waiting[:: generator.randint(1, 5)])
        it.check_integrity()
    while batch := it.schedule():
        ran += batch
        it.check_integrity()
    assert len(set(map(id, ran))) == len(ran)
    assert {id(s) for s in waiting if not s.cancelled} <= set(map(id, ran))
    assert it.queued_tokens == it.queued_sequences == 0
