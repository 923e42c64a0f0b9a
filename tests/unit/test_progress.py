"""What the ingress keeps of a stream, and what it drops of another replica's."""

import pickle
import random

import pytest

from deployments.requests import progress
from deployments.requests.progress import (
    Begun,
    Outputs,
    Part,
    Progress,
    Told,
    pack,
    told_together,
    unpack,
)
from deployments.requests.usage import Meter, OutputCounts

COUNTS = OutputCounts(4, 3, 1, 2, (1, 0, 1, 0.5))


def event(number, created=1700000000, ids=10):
    """One item has three events. Quotes in texts are escaped."""
    tool, item = f"chatcmpl-tool-{ids:016x}", f"msg_{ids + 1 + number // 3:016x}"
    said = f'"text":"\\"created\\":7 {number}","tools":[{{"id":"{tool}"}}],"item_id":"{item}"'
    return f'data: {{"id":"x","created":{created},{said}}}\n\n'


def outputs(*tokens):
    return Progress(((Part(0, pack(list(tokens))),),), COUNTS)


def test_tokens_are_packed_without_loss():
    tokens = [0, 1, 255, 256, 151_935, 2**31]
    assert unpack(pack(tokens)) == tokens
    assert unpack(pack([])) == []


PARTS = (
    (Part(0, pack([5])), Part(1, pack([6]))),
    (Part(1, pack([7, 8]), "stop", "a"),),
    (),
    (Part(0, pack([9, 2**31]), "length"),),
)


def test_each_choice_has_its_tokens():
    begun = Begun(Outputs(PARTS), COUNTS)
    assert [begun.tokens_of(choice) for choice in range(3)] == [[5, 9, 2**31], [6, 7, 8], []]


def test_outputs_are_kept_without_loss_and_small():
    kept = Outputs()
    assert not kept
    kept.extend(PARTS[:2])
    kept.extend(PARTS[2:])
    assert tuple(pickle.loads(pickle.dumps(kept))) == PARTS
    assert kept.num_tokens == 6
    one_by_one = Outputs([(Part(0, pack([i])),) for i in range(4_000)])
    assert len(pickle.dumps(one_by_one)) < 21 * 4_000


@pytest.mark.parametrize("seed", range(20))
def test_what_the_client_has_is_dropped_however_events_are_grouped(seed):
    """Whichever number the client has, and whatever the second replica's clock and ids say."""
    rng = random.Random(seed)

    def grouped(events):
        while events:
            count = rng.randint(1, 4)
            yield "".join(events[:count])
            del events[:count]

    total, seen = rng.randint(1, 20), 0
    told = Told()
    for text in grouped([event(i) for i in range(total)]):
        if seen >= total // 2 and seen:
            break
        told.note(text, outputs(1))
        seen += text.count("\n\n")
    unseen = told.unseen()
    again = grouped([event(i, 1700000009, ids=90) for i in range(total)])
    rest = "".join(unseen.of(text) for text in again)
    known = 2 + (seen - 1) // 3  # ids that the client has seen
    wanted = "".join(event(i) for i in range(seen, total))
    for number in range(known, 2 + total // 3):
        wanted = wanted.replace(f"_{10 + number:016x}", f"_{90 + number:016x}")
    assert rest == wanted


def test_a_replica_that_words_the_stream_in_another_way_is_noticed():
    told = Told()
    told.note(event(1) + event(2), outputs(1))
    with pytest.raises(ValueError, match="in another way"):
        told.unseen().of(event(1) + event(3) + event(4))
    counted = Told(checks_texts=False)
    counted.note(event(1) + event(2), outputs(1))
    assert counted.unseen().of(event(1) + event(3) + event(4)) == event(4)


def test_what_cannot_be_told_is_not_moved(monkeypatch):
    told = Told()
    assert told.begun() is None
    told.note(event(1), Progress((), COUNTS))
    assert not told.begun().outputs, "an event in front of the first token"
    told.note(event(1), outputs(1, 2))
    begun = told.begun()
    told.note(event(2), outputs(3))
    assert tuple(begun.outputs) == outputs(1, 2).outputs, "it does not grow"
    assert begun.counts == COUNTS
    told.note(event(2), None)
    assert told.begun() is None
    told.note(event(3), outputs(3))
    assert told.begun() is None, "a part is missing"

    monkeypatch.setattr(progress, "MOST_TOKENS", 3)
    long = Told()
    long.note(event(1), outputs(1, 2, 3))
    assert long.begun() is not None
    long.note(event(2), outputs(4))
    assert long.begun() is None


def test_the_model_is_told_once_and_travels_with_what_is_kept():
    first = Progress((), COUNTS, "model a")
    assert told_together([first, outputs(1), outputs(2)]).model == "model a"
    told = Told()
    told.note(event(1), first)
    told.note(event(2), outputs(1))
    assert told.begun().model == "model a"


def test_another_meter_goes_on_with_the_counts():
    first, second = Meter(), Meter()
    first.add_output(4, 3, rows=2)
    first.strengths.add([0.0, 1.0, 0.5], [0.0, 1.0, 0.25])
    first.longest = 4
    second.go_on(first.counts)
    assert second.counts == first.counts == OutputCounts(7, 3, 1, 4, (3, 1, 1, 1.25))
