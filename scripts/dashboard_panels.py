"""The panels of the Grafana dashboard, as tables: what each shows, and its queries.

`$instance` is a variable of the dashboard. grafana_dashboard.py puts them into Grafana's JSON.

A scrape reaches one ingress of an instance, and what the others said before it is stale then. So
numbers of now are each ingress's last ones of a minute (NOW), and rates are of five minutes
(RANGE). What an ingress counts itself is summed. What it tells of replicas is the same in every
ingress of an instance, so its greatest value counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INGRESS = 'instance=~"$instance"'
RANGE, NOW = "5m", "1m"


@dataclass(frozen=True)
class Panel:
    """One panel.

    about: what it shows and what to look for.
    queries: PromQL, by how its series are called.
    unit: Grafana's name of the unit.
    is_stat: shows the last value only, in large.
    bad_above: values from here on are red.
    stacked: whether the series add up to something.
    at_most: the end of the axis, if the unit has one.
    """

    title: str
    about: str
    queries: Mapping[str, str]
    unit: str = "short"
    is_stat: bool = False
    bad_above: float | None = None
    stacked: bool = False
    at_most: float | None = None


def rate(name: str, more: str = "", selector: str = INGRESS) -> str:
    """The increase per second of a counter, of each series."""
    return f"rate({name}{{{selector}{more}}}[{RANGE}])"


def rate_of_ingresses(name: str, by: str = "", more: str = "") -> str:
    """The increase per second of what each ingress counts itself, summed."""
    return f"sum{f' by ({by})' if by else ''} ({rate(f'cfg_serve_{name}_total', more)})"


def rate_of_replicas(name: str, by: str = "", more: str = "") -> str:
    """The increase per second of what replicas count, which each ingress tells.

    With several generators, each has its own series.
    """
    labels = ", ".join(dict.fromkeys(("instance", "model", by))).removesuffix(", ")
    of_one = f"max by ({labels}) ({rate(f'cfg_serve_{name}_total', more)})"
    return f"sum{f' by ({by})' if by else ''} ({of_one})"


def last(name: str) -> str:
    """A number of now, of each series."""
    return f"last_over_time(cfg_serve_{name}{{{INGRESS}}}[{NOW}])"


def now_of_ingresses(name: str, by: str = "") -> str:
    """A number of now, summed over the ingresses, for each value of the label `by` if given."""
    return f"sum by ({by}) ({last(name)})" if by else f"sum ({last(name)})"


def now_of_replicas(name: str, by: str = "replica") -> str:
    """A number of now for each replica or model, as any ingress tells it."""
    return f"max by ({by}) ({last(name)})"


def quantiles(name: str, more: str = "", selector: str = INGRESS) -> dict[str, str]:
    """The median, and the times that one in twenty and one in a hundred exceed."""
    wanted = {"median": 0.5, "95 of 100": 0.95, "99 of 100": 0.99}
    buckets = f"sum by (le) ({rate(f'{name}_bucket', more, selector)})"
    return {legend: f"histogram_quantile({q}, {buckets})" for legend, q in wanted.items()}


API = ',path!~"/health|/ready|/metrics"'
KV_USE = f"1 - sum ({now_of_replicas('kv_blocks_free')}) / sum ({now_of_replicas('kv_blocks')})"
KV_USE_OF_REPLICA = f"1 - {now_of_replicas('kv_blocks_free')} / {now_of_replicas('kv_blocks')}"
TOKENS_PER_BATCH = " / ".join(
    rate_of_replicas(f"encoder_{what}", "model") for what in ("tokens", "batches")
)
VLLM = 'job="ray"'


def of_vllm(name: str) -> str:
    """The increase per second of a counter of vLLM's, over all engines."""
    return f"sum ({rate(f'ray_vllm_{name}_total', selector=VLLM)})"


def accepted_share(kind: str) -> str:
    """The share of drafts that were accepted, of guided or plain requests."""
    more = f',of="{kind}"'
    return " / ".join(rate_of_replicas(name, more=more) for name in ("drafts_accepted", "drafts"))


ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            "Replicas of the generator",
            "Replicas that run. Fewer than you configured: one is starting, or was lost.",
            {"replicas": f"sum (max by (instance, model) ({last('replicas')}))"},
            is_stat=True,
        ),
        Panel(
            "Requests per second",
            "Requests that ended, of all paths of the API.",
            {"requests": rate_of_ingresses("requests", more=API)},
            "reqps",
            is_stat=True,
        ),
        Panel(
            "Guided tokens per second",
            "Output tokens sampled in joint steps.",
            {"tokens": rate_of_replicas("guided_tokens")},
            "short",
            is_stat=True,
        ),
        Panel(
            "Streams waiting in the queue",
            "Streams of requests without a place with the engines. A guided request has two.",
            {"streams": now_of_ingresses("admission_queued_streams")},
            is_stat=True,
            bad_above=256,
        ),
        Panel(
            "Refused per second (429)",
            "Requests answered with 429, for whatever reason.",
            {"refusals": rate_of_ingresses("refused_requests")},
            "reqps",
            is_stat=True,
            bad_above=0.1,
        ),
        Panel(
            "KV blocks in use",
            "Share of all engines' KV blocks that are in use. Cached ones that nobody uses are"
            " free.",
            {"in use": KV_USE},
            "percentunit",
            is_stat=True,
            bad_above=0.95,
        ),
    ),
    "Traffic": (
        Panel(
            "Requests by status",
            "Requests that ended per second. `left`: the client left first.",
            {"{{status}}": rate_of_ingresses("requests", "status", API)},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests by path",
            "Requests that ended per second.",
            {"{{path}}": rate_of_ingresses("requests", "path", API)},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Time to the first byte",
            "From the arrival of a request to the first byte of its answer, its wait in the"
            " queue included.",
            quantiles("cfg_serve_first_byte_seconds", API),
            "s",
        ),
        Panel(
            "Time to the last byte",
            "From the arrival of a request to the end of its answer.",
            quantiles("cfg_serve_request_seconds", API),
            "s",
        ),
        Panel(
            "Requests in progress",
            "In the ingresses: in the queue, with the engines, and other requests.",
            {"in progress": now_of_ingresses("open_requests")},
        ),
        Panel(
            "Charged tokens by tenant",
            "Prompts and outputs of all streams per second, as tenants are charged for them.",
            {"{{tenant}}": rate_of_ingresses("charged_tokens", "tenant")},
            stacked=True,
        ),
    ),
    "Guidance": (
        Panel(
            "Guided and scored tokens",
            "Tokens per second that were sampled, or scored, in joint steps.",
            {
                "guided": rate_of_replicas("guided_tokens"),
                "scored": rate_of_replicas("scored_tokens"),
            },
        ),
        Panel(
            "Groups and their streams",
            "What the engines have now. Held streams wait for a window or a schedule to change.",
            {
                "groups": f"sum ({now_of_replicas('groups')})",
                "streams of groups": f"sum ({now_of_replicas('guided_streams')})",
                "held streams": f"sum ({now_of_replicas('held_streams')})",
            },
        ),
        Panel(
            "Joint steps and solo rows",
            "Per second. A solo row is work that was thrown away because a partner did not take"
            " part: it should stay far below the joint steps. Streams with a recurrent"
            " state are then computed again.",
            {
                "joint steps": rate_of_replicas("joint_steps"),
                "solo rows": rate_of_replicas("solo_rows"),
                "streams computed again": rate_of_replicas("recomputed_streams"),
            },
        ),
        Panel(
            "Groups begun, preempted, opened and closed",
            "Per second. Preempted groups compute their prompts again. Windows begin or end"
            " guidance within a text.",
            {
                "begun": rate_of_replicas("groups_admitted"),
                "preempted": rate_of_replicas("group_preemptions"),
                "windows opened": rate_of_replicas("windows_opened"),
                "gates closed": rate_of_replicas("gate_closed_tokens"),
                "gates probed": rate_of_replicas("gate_probes"),
                "suffix tokens saved": rate_of_replicas("gate_saved_tokens"),
                "full strength": rate_of_replicas("full_strength_tokens"),
                "windows closed": rate_of_replicas("windows_closed"),
            },
        ),
    ),
    "Queue": (
        Panel(
            "Streams in the queue and with the engines",
            "At the capacity, further requests wait.",
            {
                "waiting": now_of_ingresses("admission_queued_streams"),
                "with the engines": now_of_ingresses("admission_running_streams"),
                "capacity": now_of_ingresses("admission_capacity_streams"),
            },
        ),
        Panel(
            "Requests waiting and running",
            "Requests, whatever number of streams they have.",
            {
                "waiting": now_of_ingresses("admission_queued_requests"),
                "with the engines": now_of_ingresses("admission_running_requests"),
            },
        ),
        Panel(
            "Wait in the queue",
            "Until a request got its place with the engines.",
            quantiles("cfg_serve_admission_wait_seconds"),
            "s",
        ),
        Panel(
            "Refusals by reason",
            "Requests answered with 429 per second, by what was full.",
            {"{{reason}}": rate_of_ingresses("refused_requests", "reason")},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Tokens waiting in the queue",
            "Prompts and expected outputs, estimated.",
            {"tokens": now_of_ingresses("admission_queued_tokens")},
        ),
    ),
    "KV cache and engines": (
        Panel(
            "KV blocks in use, by replica",
            "Share of the replica's blocks. Near 100 %, groups are preempted.",
            {"{{replica}}": KV_USE_OF_REPLICA},
            "percentunit",
            at_most=1,
        ),
        Panel(
            "KV blocks by holder",
            "Blocks that leaders (and plain requests) and followers hold, of all blocks. One"
            " that both share counts in each.",
            {
                "leaders": f"sum ({now_of_replicas('leader_blocks')})",
                "followers": f"sum ({now_of_replicas('follower_blocks')})",
                "all blocks": f"sum ({now_of_replicas('kv_blocks')})",
            },
        ),
        Panel(
            "Streams that the engines run",
            "Of each replica.",
            {"{{replica}}": now_of_replicas("streams_running")},
            stacked=True,
        ),
        Panel(
            "Streams that wait in the engines",
            "Of each replica. The ingress sends a quarter more than an engine can run.",
            {"{{replica}}": now_of_replicas("streams_waiting")},
            stacked=True,
        ),
        Panel(
            "Prompt tokens to compute",
            "In the engines, of prompts that are not computed yet.",
            {"{{replica}}": now_of_replicas("queued_prefill_tokens")},
            stacked=True,
        ),
        Panel(
            "Engines waiting for their frontend",
            "Share of the time for which engines stood still because answers are turned into"
            " text too slowly, summed over the replicas.",
            {"held": rate_of_replicas("engines_held_seconds")},
            "percentunit",
        ),
    ),
    "Speculation": (
        Panel(
            "Drafts verified and accepted",
            "Draft tokens per second.",
            {
                "verified, {{of}}": rate_of_replicas("drafts", "of"),
                "accepted, {{of}}": rate_of_replicas("drafts_accepted", "of"),
            },
        ),
        Panel(
            "Share of drafts accepted",
            "Guided requests whose drafts are accepted too rarely get fewer.",
            {kind: accepted_share(kind) for kind in ("guided", "plain")},
            "percentunit",
            at_most=1,
        ),
    ),
    "Routing": (
        Panel(
            "Placements by reason",
            "Calls taken by replicas per second, by why the replica was chosen.",
            {"{{reason}}": rate_of_ingresses("placements", "reason")},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Calls by way",
            "Calls to replicas per second. Those through Ray Serve's handle cost more CPU.",
            {"{{way}}": rate_of_ingresses("calls", "way")},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Failures and retries",
            "Replicas that fell silent or were found dead, and requests and streams sent to another"
            " one, within five minutes. Each ingress counts what it saw.",
            {
                "{{kind}}": (
                    f"sum by (kind) (increase(cfg_serve_replica_failures_total{{{INGRESS}}}[5m]))"
                ),
                "retries": f"sum (increase(cfg_serve_retried_requests_total{{{INGRESS}}}[5m]))",
                "streams moved, {{reason}}": (
                    f"sum by (reason) (increase(cfg_serve_moved_streams_total{{{INGRESS}}}[5m]))"
                ),
            },
        ),
        Panel(
            "Age of the oldest report",
            "Replicas report twice a second. Placement goes by these reports.",
            {"age": f"max ({last('replica_report_age_seconds')})"},
            "s",
        ),
    ),
    "Encoders": (
        Panel(
            "Sequences computed",
            "Per second, of each model.",
            {"{{model}}": rate_of_replicas("encoder_sequences", "model")},
            stacked=True,
        ),
        Panel(
            "Tokens computed",
            "Per second, of each model.",
            {"{{model}}": rate_of_replicas("encoder_tokens", "model")},
            stacked=True,
        ),
        Panel(
            "Tokens per batch",
            "Larger batches use the device better.",
            {"{{model}}": TOKENS_PER_BATCH},
        ),
        Panel(
            "Requests per second",
            "Calls taken into the encoders' queues.",
            {"{{model}}": rate_of_replicas("encoder_requests", "model")},
            "reqps",
        ),
        Panel(
            "Waiting in encoders",
            "Sequences that wait, and batches that are computed.",
            {
                "{{model}}: waiting": now_of_replicas("encoder_queued_sequences", "model"),
                "{{model}}: batches": now_of_replicas("encoder_batches_in_flight", "model"),
                "{{model}}: requests in front": now_of_ingresses(
                    "encoder_admission_queued_requests", "model"
                ),
            },
        ),
        Panel(
            "Tokens waiting in encoders, replicas",
            "In the encoders, and in front of them, where a full queue answers 429.",
            {
                "{{model}}: tokens": now_of_replicas("encoder_queued_tokens", "model"),
                "{{model}}: tokens in front": now_of_ingresses(
                    "encoder_admission_queued_tokens", "model"
                ),
                "{{model}}: replicas": now_of_replicas("encoder_replicas", "model"),
            },
        ),
    ),
    "vLLM engine (from Ray's metrics port)": (
        Panel(
            "Tokens of vLLM",
            "Prompt and output tokens per second, as vLLM counts them: leaders only.",
            {"prompts": of_vllm("prompt_tokens"), "outputs": of_vllm("generation_tokens")},
        ),
        Panel(
            "Time between tokens",
            "Of vLLM's outputs.",
            quantiles("ray_vllm_inter_token_latency_seconds", selector=VLLM),
            "s",
        ),
        Panel(
            "Prefix cache",
            "Share of prompt tokens that were found in the cache, of all streams.",
            {
                "hits": (
                    f"({of_vllm('prefix_cache_hits')} or vector(0))"
                    f" / {of_vllm('prefix_cache_queries')}"
                )
            },
            "percentunit",
            at_most=1,
        ),
        Panel(
            "Preemptions in vLLM",
            "Streams per second.",
            {"streams": f"{of_vllm('num_preemptions')} or vector(0)"},
        ),
    ),
}
