"""Guided rows in Ray Data: 200 prompts through a vLLMEngineProcessorConfig, then through `LLM`.

    python -m tests.serve.ray_llm.data_program [--by-hand]     prints one line of JSON

--by-hand: the engine arguments name our scheduler and worker as text, and nobody calls
`guided_engine_args` before Ray Data has ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cfg_core.vllm_plugin import SCHEDULER, WORKER, guided_engine_args
from tests.serve.ray_llm.bodies import PROMPTS, SEA
from tests.serve.ray_llm.process import ENGINE, ON_CPUS
from tools.serving.process import REPOSITORY

MODEL = str(REPOSITORY / "models" / "stories")
SCALES = (3.0, 1.5, 0.5, 1.0)
ROWS: list[dict[str, Any]] = [
    {"prompt": prompt, "scale": scale} for prompt in PROMPTS for scale in SCALES
]
Texts = list[tuple[str, float, str]]


def sampling_of(scale: float) -> dict[str, Any]:
    fields = {"guidance_scale": scale, "negative_prompt": SEA}
    return {"temperature": 0.0, "max_tokens": 16, "extra_args": fields}


def in_ray_data(engine: dict[str, Any]) -> Texts:
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    config = vLLMEngineProcessorConfig(
        model_source=MODEL,
        engine_kwargs={**ENGINE, **engine},
        concurrency=1,
        batch_size=50,
        chat_template_stage=False,
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": ON_CPUS},
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {**row, "sampling_params": sampling_of(row["scale"])},
        postprocess=lambda row: {name: row[name] for name in ("prompt", "scale", "generated_text")},
    )
    found = processor(ray.data.from_items(ROWS)).take_all()
    ray.shutdown()
    return sorted((row["prompt"], row["scale"], row["generated_text"]) for row in found)


def in_llm() -> Texts:
    from vllm import LLM, SamplingParams

    os.environ |= {**ON_CPUS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    llm = LLM(MODEL, **ENGINE, **guided_engine_args())
    params = [SamplingParams(**sampling_of(row["scale"])) for row in ROWS]
    outputs = llm.generate([row["prompt"] for row in ROWS], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    return sorted(
        (row["prompt"], row["scale"], text) for row, text in zip(ROWS, texts, strict=True)
    )


def main() -> None:
    by_hand = {"scheduler_cls": SCHEDULER, "worker_cls": WORKER}
    found = in_ray_data(by_hand if "--by-hand" in sys.argv else guided_engine_args())
    print(json.dumps({"ray": found, "llm": in_llm()}))


if __name__ == "__main__":
    main()
