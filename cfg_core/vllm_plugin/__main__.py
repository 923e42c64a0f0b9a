"""Print the flags that make `vllm serve` guided.

Use them like this: `vllm serve MODEL $(python -m cfg_core.vllm_plugin)`. The command `vllm` of
vLLM's CPU build fails, so start the server as a module there:
`python -m vllm.entrypoints.openai.api_server --model MODEL $(python -m cfg_core.vllm_plugin)`.
"""

from __future__ import annotations

import argparse
import json

from cfg_core.policy.pool import KV_SPLITS
from cfg_core.vllm_plugin import guided_engine_args


def flags(
    kv_split: str,
    logits_processors: dict[str, str] | None = None,
    draft_cost: float | None = None,
    allow_untested_vllm: bool = False,
) -> list[str]:
    """The engine arguments of `guided_engine_args` as command-line flags.

    No flag contains a space.
    """
    args = guided_engine_args(
        kv_split, logits_processors, draft_cost, allow_untested_vllm=allow_untested_vllm
    )
    return [
        f"--scheduler-cls={args['scheduler_cls']}",
        f"--worker-cls={args['worker_cls']}",
        f"--additional-config={json.dumps(args['additional_config'], separators=(',', ':'))}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m cfg_core.vllm_plugin", description=__doc__)
    parser.add_argument("--kv-split", choices=KV_SPLITS, default=KV_SPLITS[0])
    parser.add_argument(
        "--logits-processor",
        action="append",
        default=[],
        metavar="NAME=package.module:Class",
        help="a factory of logits processors, and the name under which requests ask for it",
    )
    parser.add_argument(
        "--draft-cost",
        type=float,
        help="cost of one more draft token, in steps without drafts; 0: drafting never backs off",
    )
    parser.add_argument(
        "--allow-untested-vllm",
        action="store_true",
        help="accept a vLLM version that was not tested; only its names and signatures are checked",
    )
    given = parser.parse_args()
    processors = dict(entry.partition("=")[::2] for entry in given.logits_processor)
    print(" ".join(flags(given.kv_split, processors, given.draft_cost, given.allow_untested_vllm)))
