"""A process of paths.py: one engine, set up as the command line says, answers the oracle's cases.

It needs a process of its own, because vLLM chooses its runner, and Triton its driver, on import. It
reads a JSON object (see `run` in paths.py), and writes one line of JSON: what ran, and the tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engine.engines import (
    ENVIRONMENT,
    Engine,
    fork_workers,
    guided,
    plain,
    tight_for_groups,
    tokens,
)
from tests.engine.formulas import MAX_MODEL_LEN, request
from tests.engine.oracle import CASES, PROMPTS
from tests.engine.scored_texts import scored, values


def main(folder: Path, setup: dict[str, Any]) -> dict[str, Any]:
    options = setup["options"]
    if options.get("distributed_executor_backend") == "ray":
        import ray

        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    fork_workers()
    few = tight_for_groups(setup["drafts"])
    engine = Engine(folder, max_model_len=MAX_MODEL_LEN, **few, **options)
    engine.llm.collective_rpc("make_intermediate_tensors")
    try:
        chosen = CASES[:: setup["every"]]
        length = {"max_tokens": setup["new_tokens"]}
        formulas = [request(*which) for which in setup["formulas"]]
        asked = [(case.prompt, guided(case, **length)) for case in chosen]
        asked += [(prompt, plain(**length)) for prompt in PROMPTS]
        asked += [(one.prompt, plain(extra_args=one.extra_args, **length)) for one in formulas]
        # First, what one formula guides all along, so that a drafter can know it.
        changing = [one for one in formulas if one.fields]
        steady = len(asked) - len(changing)
        texts = [scored(*which) for which in setup["scored"]]
        got = tokens(engine.generate(*zip(*asked[:steady], strict=True)))
        stats = engine.stats()
        got += tokens(engine.generate(*zip(*asked[steady:], *asked[: len(chosen)], strict=True)))
        guided_tokens = engine.stats()["guided_tokens"]
        outputs = engine.generate([t.prompt for t in texts], [t.asking() for t in texts])
        last = len(chosen) + len(PROMPTS)
        config = engine.llm.llm_engine.vllm_config
        return {
            "scheduler": type(engine.scheduler).__name__,
            "async": config.scheduler_config.async_scheduling,
            "v2": config.use_v2_model_runner,
            "executor": type(engine.core.model_executor).__name__,
            "world_size": config.parallel_config.world_size,
            "stats": stats,
            "guided_tokens": guided_tokens,
            "guided": got[: len(chosen)],
            "plain": got[len(chosen) : last],
            "formulas": got[last : len(asked)],
            "again": got[len(asked) :],
            "scores": [values(t, o.prompt_logprobs) for t, o in zip(texts, outputs, strict=True)],
        }
    finally:
        engine.close()


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and Ray print to stdout
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))), file=out, flush=True)
