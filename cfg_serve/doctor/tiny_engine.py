"""Sample one guided token with a tiny model of random weights.

    python -m cfg_serve.doctor.tiny_engine FOLDER

It writes the model's config.json into FOLDER. Its last line is JSON: how many tokens were sampled
and guided, in how many joint steps, and how long it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
PROMPT, NEGATIVE = [5, 6, 7, 8], [9, 10]
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def main(folder: Path) -> dict[str, Any]:
    start = time.monotonic()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    os.environ.update(SETTINGS)  # before vllm is imported
    from vllm import LLM, SamplingParams

    from cfg_core.vllm_plugin import guided_engine_args

    engine = LLM(
        str(folder),
        **guided_engine_args(),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=2**24,
        disable_log_stats=True,
    )
    guidance = {"guidance_scale": 2.0, "negative_prompt_token_ids": NEGATIVE}
    params = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True, extra_args=guidance)
    (answer,) = engine.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    stats = engine.llm_engine.engine_core.engine_core.guidance_stats()
    return {
        "tokens": len(answer.outputs[0].token_ids),
        "guided": stats["guided_tokens"],
        "joint_steps": stats["joint_steps"],
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
