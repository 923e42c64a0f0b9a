"""The names, types and meanings of all metrics of /metrics.

docs/operations.md has them as a table (`python scripts/metrics_page.py`). Every series has the
label `ingress` besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "cfg_serve_"


@dataclass(frozen=True)
class Family:
    """One metric.

    name: without PREFIX, and without `_total` for a counter.
    help: one sentence, with the unit.
    labels: besides `ingress`.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus knows it; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


_REPLICA = ("replica",)
_MODEL = ("model",)

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
    "Requests answered with 429, by what was full: "
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
    Family("open_requests", "gauge", "Requests in progress in this ingress."),
    Family("admission_queued_requests", "gauge", "Requests that wait in the queue."),
    Family("admission_queued_streams", "gauge", "Streams of the requests that wait in the queue."),
    Family("admission_queued_tokens", "gauge", "Tokens that these requests are estimated to take."),
    Family("admission_running_requests", "gauge", "Requests that have a place with the engines."),
    Family("admission_running_streams", "gauge", "Streams of the requests that have a place."),
    Family(
        "admission_capacity_streams", "gauge", "Streams that may have a place at the same time."
    ),
    Family(
        "placements",
        "counter",
        "Calls that replicas of the generator have taken, by why the replica was chosen: `only`"
        " (there was no other), `session` (it was there before), `prefix` (a beginning of a prompt"
        " was cached there), `load` (it had the least). The first that was true counts.",
        ("reason",),
    ),
    Family(
        "calls",
        "counter",
        "Calls to the generator's replicas, by the way they went: `direct`, counted once a replica"
        " has taken them, or `serve` (Ray Serve's handle).",
        ("way",),
    ),
    Family(
        "retried_requests",
        "counter",
        "Retries: calls sent again because their replica was lost before the first byte. A request"
        " may have several.",
    ),
    Family(
        "replica_failures",
        "counter",
        "Times that a replica of the generator failed, as this ingress saw it: `silent` (no sign of"
        " life) or `dead`.",
        ("kind",),
    ),
    Family(
        "replicas",
        "gauge",
        "Replicas of the generator that run. Missing until the ingress has asked for one.",
    ),
    Family(
        "replica_report_age_seconds",
        "gauge",
        "Age of the oldest report of a replica, in seconds.",
    ),
    Family("streams_running", "gauge", "Streams that the engine runs.", _REPLICA),
    Family("streams_waiting", "gauge", "Streams that wait in the engine.", _REPLICA),
    Family(
        "queued_prefill_tokens",
        "gauge",
        "Prompt tokens in the engine that are not computed yet.",
        _REPLICA,
    ),
    Family("kv_blocks", "gauge", "KV blocks of the engine.", _REPLICA),
    Family(
        "kv_blocks_free",
        "gauge",
        "KV blocks that can be handed out, cached ones that nobody uses included.",
        _REPLICA,
    ),
    Family(
        "leader_blocks",
        "gauge",
        "KV blocks that leaders and plain requests hold; one that both roles share counts in each.",
        _REPLICA,
    ),
    Family("follower_blocks", "gauge", "KV blocks that followers hold.", _REPLICA),
    Family("groups", "gauge", "Groups (guided requests) in the engine.", _REPLICA),
    Family("guided_streams", "gauge", "Streams of the groups in the engine.", _REPLICA),
    Family(
        "held_streams",
        "gauge",
        "Streams held back in the coming step, because a window or a schedule is about to change.",
        _REPLICA,
    ),
    Family("groups_admitted", "counter", "Guided requests that the engines have taken."),
    Family("joint_steps", "counter", "Joint steps, counted for each group in a step."),
    Family(
        "solo_rows",
        "counter",
        "Samples taken back because not all streams of their group took part in the step.",
    ),
    Family(
        "recomputed_streams",
        "counter",
        "Streams computed again from their start, because a recurrent state cannot be taken back.",
    ),
    Family("group_preemptions", "counter", "Groups preempted because KV blocks were lacking."),
    Family("guided_tokens", "counter", "Output tokens sampled in joint steps."),
    Family("scored_tokens", "counter", "Known tokens scored under guidance."),
    Family("windows_opened", "counter", "Windows of guidance that have begun."),
    Family(
        "windows_closed", "counter", "Windows of guidance that have ended before their request."
    ),
    Family("drafts", "counter", "Draft tokens verified, of guided or plain requests.", ("of",)),
    Family("drafts_accepted", "counter", "Draft tokens accepted.", ("of",)),
    Family(
        "engines_held_seconds", "counter", "Seconds for which engines waited for their frontend."
    ),
    Family("encoder_replicas", "gauge", "Replicas of the encoder that run.", _MODEL),
    Family(
        "encoder_admission_queued_requests",
        "gauge",
        "Requests that wait in this ingress for a place with the encoder.",
        _MODEL,
    ),
    Family(
        "encoder_admission_queued_tokens",
        "gauge",
        "Tokens that these requests are estimated to take.",
        _MODEL,
    ),
    Family("encoder_queued_sequences", "gauge", "Sequences that wait in the encoder.", _MODEL),
    Family("encoder_queued_tokens", "gauge", "Tokens of these sequences.", _MODEL),
    Family("encoder_batches_in_flight", "gauge", "Batches submitted and not finished.", _MODEL),
    Family(
        "encoder_requests", "counter", "Calls that the encoder has taken into its queue.", _MODEL
    ),
    Family("encoder_sequences", "counter", "Sequences of these calls.", _MODEL),
    Family("encoder_tokens", "counter", "Tokens of these sequences.", _MODEL),
    Family("encoder_batches", "counter", "Batches that the encoder has begun to compute.", _MODEL),
)
"""What is read at each scrape. Each family has at most one label besides `ingress`."""

ALL = (*OF_REQUESTS, *READ)
