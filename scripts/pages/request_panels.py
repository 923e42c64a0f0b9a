"""Rows of the Grafana dashboard: requests, guidance, and the queue in front of the engines."""

from __future__ import annotations

from dashboard_queries import (
    API,
    KV_USE,
    Panel,
    last,
    now_of_ingresses,
    now_of_replicas,
    quantiles,
    rate_of_ingresses,
    rate_of_replicas,
)

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
}
