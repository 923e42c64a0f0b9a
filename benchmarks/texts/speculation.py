"""Speculation under guidance: how many drafts are kept, and what that is worth.

    python benchmarks/bench_speculation.py acceptance     drafts accepted, by scale
    python benchmarks/bench_speculation.py speed [big|embedded]      output tokens/s

`acceptance`: the embedded pair of models, same prompts and engine; and the target drafting for
itself, which must be kept whole. Nothing backs off (`draft_cost=0`).

`speed`: turns are interleaved, medians count. `big` has 336 million parameters with random weights
in which all layers but the first add nothing to the residual stream, and a drafter that is its
first layer: they agree *by construction*, while the target's forward costs what 336 million
parameters cost. `embedded` is the pair as it is.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent), str(ROOT / "models" / "training")]
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

from card import card  # noqa: E402

DRAFTS = 3
SCALES = (1.0, 1.5, 2.0, 3.0, 5.0)
BATCHES = (1, 4, 16)
STREAMS_WITH_DRAFTS = 8
"""Steps with more streams than this do without drafts, by vLLM's own control: a CPU has no rows to
spare there."""


def engine(
    target: Path,
    draft: Path | None,
    draft_cost: float | None = None,
    by_batch: bool = False,
    **options: Any,
) -> Any:
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    if draft is not None:
        speculation: dict[str, Any] = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": DRAFTS,
            "draft_sample_method": "probabilistic",
        }
        if by_batch:
            speculation["num_speculative_tokens_per_batch_size"] = [
                (1, STREAMS_WITH_DRAFTS, DRAFTS),
                (STREAMS_WITH_DRAFTS + 1, 64, 0),
            ]
        options["speculative_config"] = speculation
    return LLM(
        str(target),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
        **options,
        **guided_engine_args(draft_cost=draft_cost),
    )


def stats(llm: Any) -> dict[str, int]:
    found: dict[str, int] = llm.llm_engine.engine_core.engine_core.scheduler.guidance_stats()
    return found


# --- acceptance


def stories(
    llm: Any, scale: float, temperature: float, number: int, length: int
) -> tuple[list[Any], list[Any]]:
    """Prompts and parameters: stories about the model's topics, away from none."""
    from measure import TOPIC_NAMES, negative_ids, prompt_ids
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts, params = [], []
    for i in range(number):
        topic = TOPIC_NAMES[i % len(TOPIC_NAMES)]
        extra = None
        if scale != 1:
            negative = negative_ids(tokenizer, "completion", "free", topic)
            extra = {"guidance_scale": scale, "negative_prompt_token_ids": negative}
        prompts.append({"prompt_token_ids": prompt_ids(tokenizer, "completion", topic)})
        params.append(
            SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=length,
                ignore_eos=True,
                extra_args=extra,
            )
        )
    return prompts, params


def kept(llm: Any, guided_drafts: bool, **load: Any) -> dict[str, float]:
    """The share of drafts that are kept, and tokens per step, with the drafter guided or not."""
    core = llm.llm_engine.engine_core.engine_core
    drafter = core.model_executor.driver_worker.worker.model_runner.drafter
    joint_rows = drafter.joint_rows
    if not guided_drafts:
        drafter.joint_rows = lambda: None
    before, kind = stats(llm), "plain" if load["scale"] == 1 else "guided"
    prompts, params = stories(llm, **load)
    llm.generate(prompts, params, use_tqdm=False)
    drafter.joint_rows = joint_rows
    steps, drafts, accepted = (
        stats(llm)[f"{kind}_{name}"] - before[f"{kind}_{name}"]
        for name in ("draft_steps", "drafts", "drafts_accepted")
    )
    return {"drafts": drafts, "kept": accepted / drafts, "tokens_per_step": 1 + accepted / steps}


def acceptance(args: argparse.Namespace) -> list[dict[str, Any]]:
    models = ROOT / "models"
    # All stay alive to the end: vLLM's one set of process groups goes with the first engine.
    subjects = {
        name: engine(models / "stories", models / draft, draft_cost=0)
        for name, draft in (
            ("embedded pair", "stories-draft"),
            ("target drafts for itself", "stories"),
        )
    }
    rows = []
    print(
        "| drafter | temperature | scale | kept, drafts unguided | kept, drafts guided | tokens a"
        " step |"
    )
    print("|---|---|---|---|---|---|")
    for name, llm in subjects.items():
        for temperature in (0.0, 1.0):
            for scale in SCALES:
                load = {
                    "scale": scale,
                    "temperature": temperature,
                    "number": args.stories,
                    "length": 80,
                }
                without, with_ = (
                    kept(llm, guided_drafts, **load) for guided_drafts in (False, True)
                )
                rows.append(
                    {
                        "drafter": name,
                        "temperature": temperature,
                        "scale": scale,
                        "unguided": without,
                    }
                )
                rows[-1]["guided"] = with_
                steps = f"{without['tokens_per_step']:.2f} -> {with_['tokens_per_step']:.2f}"
                share = f"{without['kept']:.1%} | {with_['kept']:.1%}"
                print(f"| {name} | {temperature:g} | {scale:g} | {share} | {steps} |", flush=True)
    return rows


# --- speed


def big_pair(
    folder: Path, layers: int = 20, hidden: int = 1024, ffn: int = 4096
) -> tuple[Path, Path]:
    """A target whose layers behind the first add nothing, and its first layer as the drafter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "stories")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        initializer_range=0.04,
    )
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in target.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    print(
        f"big: {sum(p.numel() for p in target.parameters()) / 1e6:.0f} million parameters",
        file=sys.stderr,
    )
    config.num_hidden_layers = 1
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = draft.load_state_dict(target.state_dict(), strict=False).missing_keys
    assert not missing
    config.num_hidden_layers = layers
    for model, name in ((target, "target"), (draft, "draft")):
        model.config.num_hidden_layers = layers if name == "target" else 1
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        models = ROOT / "models"
        big = args.model == "big"
        target, draft = (
            big_pair(Path(folder)) if big else (models / "stories", models / "stories-draft")
        )
        without = engine(target, None)
        drafting = engine(target, draft, draft_cost=args.draft_cost, by_batch=True)
        hf = hf_guided(target, args.scale)
        rows = []
        print(
            "| batch | plain | plain + drafts | guided | guided + drafts | HF guided | guided +"
            " drafts : plain | : guided | drafts kept |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for batch in BATCHES:
            length = args.tokens if batch < max(BATCHES) else args.tokens // 2
            load: dict[str, Any] = {"temperature": 0.0, "number": batch, "length": length}

            def hf_rate(load: dict[str, Any] = load) -> float:
                return hf(stories(without, args.scale, **load), load["length"])

            runs: dict[str, Callable[[], float]] = {
                "plain": partial(rate, without, scale=1.0, **load),
                "plain + drafts": partial(rate, drafting, scale=1.0, **load),
                "guided": partial(rate, without, scale=args.scale, **load),
                "guided + drafts": partial(rate, drafting, scale=args.scale, **load),
                "HF guided": hf_rate,
            }
            before = stats(drafting)
            turns = [{name: run() for name, run in runs.items()} for _ in range(args.turns + 1)][
                1:
            ]  # first warms up
            drafts, accepted = (
                stats(drafting)[k] - before[k] for k in ("guided_drafts", "guided_drafts_accepted")
            )
            row = {name: statistics.median(turn[name] for turn in turns) for name in runs}
            ratios = {
                to: statistics.median(turn["guided + drafts"] / turn[to] for turn in turns)
                for to in ("plain", "guided")
            }
            share = accepted / drafts if drafts else None
            rows.append({"batch": batch, **row, "ratios": ratios, "kept": share, "turns": turns})
            cells = " | ".join(f"{value:.1f}" for value in row.values())
            told = "none made" if share is None else f"{share:.1%}"
            print(
                f"| {batch} | {cells} | {ratios['plain']:.2f} | {ratios['guided']:.2f} | {told} |",
                flush=True,
            )
        return rows


def rate(llm: Any, **load: Any) -> float:
    """Output tokens/s."""
    prompts, params = stories(llm, **load)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)


def hf_guided(folder: Path, scale: float) -> Callable[[Any, int], float]:
    """Hugging Face `generate(guidance_scale=...)`, one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return ids, mask

    def run(load: tuple[list[Any], list[Any]], length: int) -> float:
        ids, mask = padded([prompt["prompt_token_ids"] for prompt in load[0]])
        negative, negative_mask = padded(
            [params.extra_args["negative_prompt_token_ids"] for params in load[1]]
        )
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=length,
            guidance_scale=scale,
            negative_prompt_ids=negative,
            negative_prompt_attention_mask=negative_mask,
            pad_token_id=0,
        )
        return len(ids) * length / (time.perf_counter() - start)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("acceptance", "speed"), nargs="?", default="acceptance")
    parser.add_argument("model", choices=("big", "embedded"), nargs="?", default="embedded")
    parser.add_argument(
        "--stories", type=int, default=60, help="texts of 80 tokens for each share of drafts kept"
    )
    parser.add_argument("--scale", type=float, default=1.5, help="of the speed table")
    parser.add_argument(
        "--tokens", type=int, default=64, help="a text; half of it in the largest batch"
    )
    parser.add_argument(
        "--draft-cost", type=float, help="of the speed table, see configs/cfg-speculative.yaml"
    )
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(card()))
    rows = acceptance(args) if args.part == "acceptance" else speed(args)
    print(json.dumps({"benchmark": f"speculation {args.part}", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
