"""Rows of the Grafana dashboard: engines of generators and encoders, and the calls to them."""

from __future__ import annotations

from dashboard_queries import (
    INGRESS,
    KV_USE_OF_REPLICA,
    TOKENS_PER_BATCH,
    VLLM,
    Panel,
    accepted_share,
    last,
    now_of_ingresses,
    now_of_replicas,
    of_vllm,
    quantiles,
    rate_of_ingresses,
    rate_of_replicas,
)

ROWS: dict[str, tuple[Panel, ...]] = {
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
