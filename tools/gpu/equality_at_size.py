"""Guided tokens at a large vocabulary and with long prompts, against the reference.

    python -m tools.gpu.equality_at_size [--vocabulary 151936] [--prompt 32768] [--dtype bfloat16]

As in tests/gpu/test_equality_gpu.py, the model of transformers reads the engine's tokens, with both
streams, in float32. The guided score of each chosen token must be within rounding of the best one.
Prompts and negatives are long in turn. The engine runs as it comes: on a GPU that is Model Runner
V2 with CUDA graphs and async scheduling. Prints a line of JSON, and fails if a token is wrong, or
if the text of another request would pass, too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.llm import guidance
from benchmarks.report import Report, parser

from .gpu_model import model_of_ids

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the engine cannot be forked
SCALES = (1.5, 3.0, -1.0, 1.0)
FIRST_ID = 4
ROUNDING = {"bfloat16": 0.15, "float32": 0.02}
"""The largest allowed error of a log-probability, as in tests/gpu."""
PIECE = 2048
"""Tokens that the reference reads at a time."""
SHORT = 16
"""A stream is long, or this part of it."""


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    negative: list[int]
    scale: float


def requests(vocabulary: int, longest: int) -> list[Asked]:
    """Each scale with a long prompt, a long negative, and both."""
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(FIRST_ID, vocabulary) for _ in range(length)]

    sizes = ((longest, longest // SHORT), (longest // SHORT, longest), (longest, longest))
    pairs = [(ids(prompt), ids(negative)) for prompt, negative in sizes]
    return [Asked(prompt, negative, scale) for scale in SCALES for prompt, negative in pairs]


def generate(folder: Path, asked: list[Asked], args: argparse.Namespace) -> dict[str, Any]:
    """The tokens of each request, and which engine made them."""
    from vllm import LLM, SamplingParams

    from cfg_core.vllm_plugin import guided_engine_args

    cuda = torch.cuda.device_count() > 0
    sizes = {"kv_cache_memory_bytes": (8 << 30) if cuda else (512 << 20)}
    more: dict[str, Any] = {"gpu_memory_utilization": 0.4} if cuda else {"enforce_eager": True}
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.prompt + 2 * args.new_tokens,
        max_num_seqs=32,
        **{**sizes, **more},
        **guided_engine_args(),
    )
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=args.new_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=guidance(one.scale, one.negative),
        )
        for one in asked
    ]
    began = time.monotonic()
    prompts: Any = [{"prompt_token_ids": one.prompt} for one in asked]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.monotonic() - began
    config = llm.llm_engine.vllm_config
    llm.llm_engine.engine_core.shutdown()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "v2": config.use_v2_model_runner,
        "async": config.scheduler_config.async_scheduling,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "generate_s": round(took, 2),
    }


@torch.inference_mode()
def regrets(folder: Path, asked: list[Asked], tokens: list[list[int]], dtype: str) -> list[float]:
    """For each request, how far its worst token is below the best score, in rounding errors."""
    from transformers import LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounded = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model: Any = rounded.float().eval().to(device)
    found = []
    for one, chosen in zip(asked, tokens, strict=True):
        rows = []
        for start in (one.prompt, one.negative):
            ids = torch.tensor([[*start, *chosen[:-1]]], device=device)
            states = hidden_states(model, ids)[len(start) - 1 :]
            rows.append(torch.log_softmax(model.lm_head(states), dim=-1))
        scores = rows[1] + one.scale * (rows[0] - rows[1])
        ours = scores.gather(-1, torch.tensor(chosen, device=device)[:, None])[:, 0]
        bound = 2 * ROUNDING[dtype] * (abs(one.scale) + abs(1 - one.scale))
        found.append(float((scores.max(-1).values - ours).max()) / bound)
    return found


def hidden_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states of one text: [tokens, hidden].

    It is read in pieces. In float32 the attention of all tokens to all would not fit on a GPU.
    """
    states, cache = [], None
    for piece in torch.split(ids, PIECE, dim=1):
        out = model.model(piece, past_key_values=cache, use_cache=True)
        states.append(out.last_hidden_state[0])
        cache = out.past_key_values
    return torch.cat(states)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--vocabulary", type=int, default=151_936)
    options.add_argument("--prompt", type=int, default=32_768, help="tokens of a long stream")
    options.add_argument("--new-tokens", type=int, default=16)
    options.add_argument("--dtype", choices=ROUNDING, default="bfloat16")
    args = options.parse_args()
    report = Report("equality at size", args)
    asked = requests(args.vocabulary, args.prompt)
    with tempfile.TemporaryDirectory() as name:
        folder = model_of_ids(Path(name), args.vocabulary)
        made = generate(folder, asked, args)
        tokens = made.pop("tokens")
        found = regrets(folder, asked, tokens, args.dtype)
        (control,) = regrets(folder, asked[:1], tokens[1:2], args.dtype)
    wrong = [place for place, regret in enumerate(found) if not regret <= 1]
    report.end(
        headline=f"{len(asked) - len(wrong)} of {len(asked)} texts right, worst token"
        f" {max(found):.2f} of the allowed error (V{1 + made['v2']},"
        f" {'async' if made['async'] else 'sync'}, graphs {made['graphs']})",
        **made,
        regrets=[round(regret, 3) for regret in found],
        wrong=wrong,
        of_another_text=round(control, 3),
    )
    return int(bool(wrong) or control <= 1)


if __name__ == "__main__":
    sys.exit(main())
