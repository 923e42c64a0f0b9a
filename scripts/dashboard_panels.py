"""The panels of the Grafana dashboard, as tables: what each shows, and its queries.

`$instance` is a variable of the dashboard. grafana_dashboard.py puts them into Grafana's JSON.

A scrape reaches one ingress of an instance, and what the others said before it is stale then. So
numbers of now are each ingress's last ones of a minute (NOW), and rates are of five minutes
(RANGE). What an ingress counts itself is summed. What it tells of replicas is the same in every
ingress of an instance, so its greatest value counts.
"""

from __future__ import annotations

from dataclasses import dataclass

INGRESS = 'instance=~"$instance"'
RANGE, NOW = "5m", "1m"


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    expr: PromQL.
    legend: how its series are called.
    """

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel.

    about: what it shows and what to look for.
    unit: Grafana's name of the unit.
    is_stat: shows the last value only, in large.
    bad_above: values from here on are red.
    stacked: whether the series add up to something.
    at_most: the end of the axis, if the unit has one.
    """

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    is_stat: bool = False
    bad_above: float | None = None
    stacked: bool = False
    at_most: float | None = None


def rate(name: str, more: str = "", selector: str = INGRESS) -> str:
    """The increase per second of a counter, of each series."""
    return f"rate({name}{{{selector}{more}}}[{RANGE}])"


def own(name: str, by: str = "", more: str = "") -> str:
    """The increase per second of what each ingress counts itself, summed."""
    return f"sum{f' by ({by})' if by else ''} ({rate(f'cfg_serve_{name}_total', more)})"


def told(name: str, by: str = "", more: str = "") -> str:
    """The increase per second of what replicas count, which each ingress tells."""
    labels = f"instance, {by}" if by else "instance"
    of_one = f"max by ({labels}) ({rate(f'cfg_serve_{name}_total', more)})"
    return f"sum{f' by ({by})' if by else ''} ({of_one})"


def last(name: str) -> str:
    """A number of now, of each series."""
    return f"last_over_time(cfg_serve_{name}{{{INGRESS}}}[{NOW}])"


def of_ingresses(name: str, by: str = "") -> str:
    """A number of now, summed over the ingresses, for each value of the label `by` if given."""
    return f"sum by ({by}) ({last(name)})" if by else f"sum ({last(name)})"


def of_replicas(name: str, by: str = "replica") -> str:
    """A number of now for each replica or model, as any ingress tells it."""
    return f"max by ({by}) ({last(name)})"


def quantile(q: float, name: str, by: str = "", more: str = "", selector: str = INGRESS) -> str:
    """A quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) ({rate(f'{name}_bucket', more, selector)}))"


def quantiles(name: str, more: str = "", selector: str = INGRESS) -> tuple[Query, ...]:
    """The median, and the times that one in twenty and one in a hundred exceed."""
    return tuple(
        Query(quantile(q, name, more=more, selector=selector), legend)
        for q, legend in ((0.5, "median"), (0.95, "95 of 100"), (0.99, "99 of 100"))
    )


API = ',path!~"/health|/ready|/metrics"'
KV_USE = f"1 - sum ({of_replicas('kv_blocks_free')}) / sum ({of_replicas('kv_blocks')})"
VLLM = 'job="ray"'


def of_vllm(name: str) -> str:
    """The increase per second of a counter of vLLM's, over all engines."""
    return f"sum ({rate(f'ray_vllm_{name}_total', selector=VLLM)})"


def accepted_share(kind: str) -> str:
    """The share of drafts that were accepted, of guided or plain requests."""
    more = f',of="{kind}"'
    return f"{told('drafts_accepted', more=more)} / {told('drafts', more=more)}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            Panel(
                "Replicas of the generator",
                "Replicas that run. Fewer than you configured: one is starting, or was lost.",
                (Query(f"sum (max by (instance) ({last('replicas')}))", "replicas"),),
                is_stat=True,
            ),
            Panel(
                "Requests per second",
                "Requests that ended, of all paths of the API.",
                (Query(own("requests", more=API), "requests"),),
                "reqps",
                is_stat=True,
            ),
            Panel(
                "Guided tokens per second",
                "Output tokens sampled in joint steps.",
                (Query(told("guided_tokens"), "tokens"),),
                "short",
                is_stat=True,
            ),
            Panel(
                "Streams waiting in the queue",
                "Streams of requests without a place with the engines. A guided request has two.",
                (Query(of_ingresses("admission_queued_streams"), "streams"),),
                is_stat=True,
                bad_above=256,
            ),
            Panel(
                "Refused per second (429)",
                "Requests answered with 429, for whatever reason.",
                (Query(own("refused_requests"), "refusals"),),
                "reqps",
                is_stat=True,
                bad_above=0.1,
            ),
            Panel(
                "KV blocks in use",
                "Share of all engines' KV blocks that are in use. Cached ones that nobody uses are"
                " free.",
                (Query(KV_USE, "in use"),),
                "percentunit",
                is_stat=True,
                bad_above=0.95,
            ),
        ),
    ),
    (
        "Traffic",
        (
            Panel(
                "Requests by status",
                "Requests that ended per second. `left`: the client left first.",
                (Query(own("requests", "status", API), "{{status}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Requests by path",
                "Requests that ended per second.",
                (Query(own("requests", "path", API), "{{path}}"),),
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
                (Query(of_ingresses("open_requests"), "in progress"),),
            ),
            Panel(
                "Charged tokens by tenant",
                "Prompts and outputs of all streams per second, as tenants are charged for them.",
                (Query(own("charged_tokens", "tenant"), "{{tenant}}"),),
                stacked=True,
            ),
        ),
    ),
    (
        "Guidance",
        (
            Panel(
                "Guided and scored tokens",
                "Tokens per second that were sampled, or scored, in joint steps.",
                (
                    Query(told("guided_tokens"), "guided"),
                    Query(told("scored_tokens"), "scored"),
                ),
            ),
            Panel(
                "Groups and their streams",
                "What the engines have now. Held streams wait for a window or a schedule to"
                " change.",
                (
                    Query(f"sum ({of_replicas('groups')})", "groups"),
                    Query(f"sum ({of_replicas('guided_streams')})", "streams of groups"),
                    Query(f"sum ({of_replicas('held_streams')})", "held streams"),
                ),
            ),
            Panel(
                "Joint steps and solo rows",
                "Per second. A solo row is work that was thrown away because a partner did not take"
                " part: it should stay far below the joint steps. Streams with a recurrent"
                " state are then computed again.",
                (
                    Query(told("joint_steps"), "joint steps"),
                    Query(told("solo_rows"), "solo rows"),
                    Query(told("recomputed_streams"), "streams computed again"),
                ),
            ),
            Panel(
                "Groups begun, preempted, opened and closed",
                "Per second. Preempted groups compute their prompts again. Windows begin or end"
                " guidance within a text.",
                (
                    Query(told("groups_admitted"), "begun"),
                    Query(told("group_preemptions"), "preempted"),
                    Query(told("windows_opened"), "windows opened"),
                    Query(told("windows_closed"), "windows closed"),
                ),
            ),
        ),
    ),
    (
        "Queue",
        (
            Panel(
                "Streams in the queue and with the engines",
                "At the capacity, further requests wait.",
                (
                    Query(of_ingresses("admission_queued_streams"), "waiting"),
                    Query(of_ingresses("admission_running_streams"), "with the engines"),
                    Query(of_ingresses("admission_capacity_streams"), "capacity"),
                ),
            ),
            Panel(
                "Requests waiting and running",
                "Requests, whatever number of streams they have.",
                (
                    Query(of_ingresses("admission_queued_requests"), "waiting"),
                    Query(of_ingresses("admission_running_requests"), "with the engines"),
                ),
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
                (Query(own("refused_requests", "reason"), "{{reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Tokens waiting in the queue",
                "Prompts and expected outputs, estimated.",
                (Query(of_ingresses("admission_queued_tokens"), "tokens"),),
            ),
        ),
    ),
    (
        "KV cache and engines",
        (
            Panel(
                "KV blocks in use, by replica",
                "Share of the replica's blocks. Near 100 %, groups are preempted.",
                (
                    Query(
                        f"1 - {of_replicas('kv_blocks_free')} / {of_replicas('kv_blocks')}",
                        "{{replica}}",
                    ),
                ),
                "percentunit",
                at_most=1,
            ),
            Panel(
                "KV blocks by holder",
                "Blocks that leaders (and plain requests) and followers hold, of all blocks. One"
                " that both share counts in each.",
                (
                    Query(f"sum ({of_replicas('leader_blocks')})", "leaders"),
                    Query(f"sum ({of_replicas('follower_blocks')})", "followers"),
                    Query(f"sum ({of_replicas('kv_blocks')})", "all blocks"),
                ),
            ),
            Panel(
                "Streams that the engines run",
                "Of each replica.",
                (Query(of_replicas("streams_running"), "{{replica}}"),),
                stacked=True,
            ),
            Panel(
                "Streams that wait in the engines",
                "Of each replica. The ingress sends a quarter more than an engine can run.",
                (Query(of_replicas("streams_waiting"), "{{replica}}"),),
                stacked=True,
            ),
            Panel(
                "Prompt tokens to compute",
                "In the engines, of prompts that are not computed yet.",
                (Query(of_replicas("queued_prefill_tokens"), "{{replica}}"),),
                stacked=True,
            ),
            Panel(
                "Engines waiting for their frontend",
                "Share of the time for which engines stood still because answers are turned into"
                " text too slowly, summed over the replicas.",
                (Query(told("engines_held_seconds"), "held"),),
                "percentunit",
            ),
        ),
    ),
    (
        "Speculation",
        (
            Panel(
                "Drafts verified and accepted",
                "Draft tokens per second.",
                (
                    Query(told("drafts", "of"), "verified, {{of}}"),
                    Query(told("drafts_accepted", "of"), "accepted, {{of}}"),
                ),
            ),
            Panel(
                "Share of drafts accepted",
                "Guided requests whose drafts are accepted too rarely get fewer.",
                tuple(Query(accepted_share(kind), kind) for kind in ("guided", "plain")),
                "percentunit",
                at_most=1,
            ),
        ),
    ),
    (
        "Routing",
        (
            Panel(
                "Placements by reason",
                "Calls taken by replicas per second, by why the replica was chosen.",
                (Query(own("placements", "reason"), "{{reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Calls by way",
                "Calls to replicas per second. Those through Ray Serve's handle cost more CPU.",
                (Query(own("calls", "way"), "{{way}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Failures and retries",
                "Replicas that fell silent or were found dead, and requests sent to another one,"
                " within five minutes. Each ingress counts what it saw.",
                (
                    Query(
                        "sum by (kind) (increase(cfg_serve_replica_failures_total"
                        f"{{{INGRESS}}}[5m]))",
                        "{{kind}}",
                    ),
                    Query(
                        f"sum (increase(cfg_serve_retried_requests_total{{{INGRESS}}}[5m]))",
                        "retries",
                    ),
                ),
            ),
            Panel(
                "Age of the oldest report",
                "Replicas report twice a second. Placement goes by these reports.",
                (Query(f"max ({last('replica_report_age_seconds')})", "age"),),
                "s",
            ),
        ),
    ),
    (
        "Encoders",
        (
            Panel(
                "Sequences computed",
                "Per second, of each model.",
                (Query(told("encoder_sequences", "model"), "{{model}}"),),
                stacked=True,
            ),
            Panel(
                "Tokens computed",
                "Per second, of each model.",
                (Query(told("encoder_tokens", "model"), "{{model}}"),),
                stacked=True,
            ),
            Panel(
                "Tokens per batch",
                "Larger batches use the device better.",
                (
                    Query(
                        f"{told('encoder_tokens', 'model')} / {told('encoder_batches', 'model')}",
                        "{{model}}",
                    ),
                ),
            ),
            Panel(
                "Requests per second",
                "Calls taken into the encoders' queues.",
                (Query(told("encoder_requests", "model"), "{{model}}"),),
                "reqps",
            ),
            Panel(
                "Waiting in encoders",
                "Sequences that wait, and batches that are computed.",
                (
                    Query(of_replicas("encoder_queued_sequences", "model"), "{{model}}: waiting"),
                    Query(of_replicas("encoder_batches_in_flight", "model"), "{{model}}: batches"),
                    Query(
                        of_ingresses("encoder_admission_queued_requests", "model"),
                        "{{model}}: requests in front",
                    ),
                ),
            ),
            Panel(
                "Tokens waiting in encoders, replicas",
                "In the encoders, and in front of them, where a full queue answers 429.",
                (
                    Query(of_replicas("encoder_queued_tokens", "model"), "{{model}}: tokens"),
                    Query(
                        of_ingresses("encoder_admission_queued_tokens", "model"),
                        "{{model}}: tokens in front",
                    ),
                    Query(of_replicas("encoder_replicas", "model"), "{{model}}: replicas"),
                ),
            ),
        ),
    ),
    (
        "vLLM engine (from Ray's metrics port)",
        (
            Panel(
                "Tokens of vLLM",
                "Prompt and output tokens per second, as vLLM counts them: leaders only.",
                (
                    Query(of_vllm("prompt_tokens"), "prompts"),
                    Query(
                        of_vllm("generation_tokens"),
                        "outputs",
                    ),
                ),
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
                (
                    Query(
                        f"({of_vllm('prefix_cache_hits')} or vector(0))"
                        f" / {of_vllm('prefix_cache_queries')}",
                        "hits",
                    ),
                ),
                "percentunit",
                at_most=1,
            ),
            Panel(
                "Preemptions in vLLM",
                "Streams per second.",
                (Query(f"{of_vllm('num_preemptions')} or vector(0)", "streams"),),
            ),
        ),
    ),
)
