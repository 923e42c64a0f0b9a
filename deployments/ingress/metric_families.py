"""The names, types and meanings of all metrics of /metrics.

docs/operations.md has them as a table (`make pages`). Every series has the
label `ingress` besides. With several generators, what is of one has the label `model`, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

PREFIX = "cfg_serve_"


Kind: TypeAlias = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Family:
    """One metric.

    name: without PREFIX, and without `_total` for a counter.
    help: one sentence, with the unit.
    labels: besides `ingress`.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus knows it; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _families(kind: Kind, *labels: str, **helps: str) -> list[Family]:
    """Families of one kind with the same labels: their help by their names."""
    return [Family(name, kind, text, labels) for name, text in helps.items()]


REQUESTS = Family(
    "requests",
    "counter",
    "Requests that have ended; status `left`: the client left before there was an answer.",
    ("path", "status", "tenant"),
)
CHARGED = Family(
    "charged_tokens",
    "counter",
    "Tokens charged to the tenant: prompts and outputs of all streams.",
    ("tenant",),
)
FIRST_BYTE = Family(
    "first_byte_seconds",
    "histogram",
    "Seconds from the arrival of a request to the first byte of its answer.",
    ("path",),
)
DURATION = Family(
    "request_seconds",
    "histogram",
    "Seconds from the arrival of a request to the last byte of its answer.",
    ("path",),
)
REFUSALS = {
    "queue": "in front of the generator",
    "key_streams": "the API key's own limit",
    "rate": "its limit per minute",
    "open_requests": "`limits`",
    "serve_queue": "Serve's own, while a replica is missing",
    "encoder_queue": "of an encoder",
    "grammars": "trials of grammars",
    "media": "images, audio and video of a replica, while they are fetched and decoded",
    "engine": "anything else",
}
"""The reasons of OverloadedError (cfg_core/errors.py)."""

REFUSED = Family(
    "refused_requests",
    "counter",
    "Requests that the ingress answered with 429, by what was full: "
    + ", ".join(f"`{reason}` ({what})" for reason, what in REFUSALS.items())
    + ".",
    ("reason",),
)
WAIT = Family(
    "admission_wait_seconds",
    "histogram",
    "Seconds that requests waited in the queue for a place with the engines. Those that left or ran"
    " out of time there count, too; those that were refused at once do not.",
)

OF_REQUESTS = (REQUESTS, CHARGED, FIRST_BYTE, DURATION, REFUSED, WAIT)
"""What is counted as it happens."""

READ = (
    *_families(
        "gauge",
        open_requests="Requests in progress in this ingress.",
        admission_queued_requests="Requests that wait in the queue.",
        admission_queued_streams="Streams of the requests that wait in the queue.",
        admission_queued_tokens="Tokens that these requests are estimated to take.",
        admission_running_requests="Requests that have a place with the engines.",
        admission_running_streams="Streams of the requests that have a place.",
        admission_capacity_streams="Streams that may have a place at the same time.",
    ),
    Family(
        "placements",
        "counter",
        "Calls that replicas of the generator have taken, by why the replica was chosen: `only` "
        "(there was no other), `session` (it was there before), `prefix` (a beginning of a prompt "
        "was cached there), `load` (it had the least). The first that was true counts.",
        ("reason",),
    ),
    Family(
        "calls",
        "counter",
        "Calls to the generator's replicas, by the way they went: `direct`, counted once a "
        "replica has taken them, or `serve` (Ray Serve's handle).",
        ("way",),
    ),
    Family(
        "retried_requests",
        "counter",
        "Retries: calls sent again because their replica was lost before the first byte. A "
        "request may have several.",
    ),
    Family(
        "moved_streams",
        "counter",
        "Streams that went on on another replica after the first byte, and answers that are not "
        "streamed behind their tokens, by why: their replica was `lost`, or it was `drained`. One "
        "may be moved several times.",
        ("reason",),
    ),
    Family(
        "replica_failures",
        "counter",
        "Times that a replica of the generator failed, as this ingress saw it: `silent` (no sign "
        "of life) or `dead`.",
        ("kind",),
    ),
    *_families(
        "gauge",
        replicas=(
            "Replicas of the generator that run. Missing until the ingress has asked for one, and"
            " while the generator is asleep."
        ),
        replica_report_age_seconds="Age of the oldest report of a replica, in seconds.",
    ),
    *_families(
        "gauge",
        "replica",
        streams_running="Streams that the engine runs.",
        streams_waiting="Streams that wait in the engine.",
        queued_prefill_tokens="Prompt tokens in the engine that are not computed yet.",
        kv_blocks="KV blocks of the engine.",
        kv_blocks_free="KV blocks that can be handed out, cached ones that nobody uses included.",
        leader_blocks=(
            "KV blocks that leaders and plain requests hold; one that both roles share counts in "
            "each."
        ),
        follower_blocks="KV blocks that followers hold.",
        groups="Groups (guided requests) in the engine.",
        guided_streams="Streams of the groups in the engine.",
        held_streams=(
            "Streams held back in the coming step, because a window or a schedule is about to "
            "change, or a gate is not known yet."
        ),
    ),
    *_families(
        "counter",
        groups_admitted="Guided requests that the engines have taken.",
        joint_steps="Joint steps, counted for each group in a step.",
        solo_rows=(
            "Samples taken back because not all streams of their group took part in the step."
        ),
        recomputed_streams=(
            "Streams computed again from their start, because a recurrent state cannot be taken "
            "back."
        ),
        group_preemptions="Groups preempted because KV blocks were lacking.",
        guided_tokens="Output tokens sampled in joint steps, or alone where their gate was closed.",
        full_strength_tokens=(
            "Of these, in requests with a trust region, a gate or a rule: those that it left whole."
        ),
        gate_closed_tokens="Of these: those whose gate was closed, so that they were not guided.",
        gate_probes="Steps of a leader alone, to see whether its gate is closed.",
        gate_saved_tokens="Tokens of suffixes that closed gates have saved.",
        scored_tokens="Known tokens scored under guidance.",
        windows_opened="Windows of guidance that have begun.",
        windows_closed="Windows of guidance that have ended before their request.",
    ),
    *_families(
        "counter",
        "of",
        drafts="Draft tokens verified, of guided or plain requests.",
        drafts_accepted="Draft tokens accepted.",
    ),
    Family(
        "engines_held_seconds",
        "counter",
        "Seconds for which engines waited for their frontend.",
    ),
    *_families(
        "gauge",
        "model",
        encoder_replicas="Replicas of the encoder that run.",
        encoder_admission_queued_requests=(
            "Requests that wait in this ingress for a place with the encoder."
        ),
        encoder_admission_queued_tokens="Tokens that these requests are estimated to take.",
        encoder_queued_sequences="Sequences that wait in the encoder.",
        encoder_queued_tokens="Tokens of these sequences.",
        encoder_batches_in_flight="Batches submitted and not finished.",
    ),
    *_families(
        "counter",
        "model",
        encoder_requests="Calls that the encoder has taken into its queue.",
        encoder_sequences="Sequences of these calls.",
        encoder_tokens="Tokens of these sequences.",
        encoder_batches="Batches that the encoder has begun to compute.",
    ),
)
"""What is read at each scrape. Each family has at most one label besides `ingress`."""

ALL = (*OF_REQUESTS, *READ)
