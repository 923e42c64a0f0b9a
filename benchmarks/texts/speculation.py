"""Speculation under guidance: how many drafts are kept, and what that is worth.

    python -m benchmarks.texts.speculation acceptance     drafts accepted, by scale
    python -m benchmarks.texts.speculation speed [big|embedded]      output tokens/s
    python -m benchmarks.texts.speculation costs [big|embedded]      the same, by what a draft costs

`acceptance`: the embedded pair of models, same prompts and engine; and the target drafting for
itself, which must be kept whole. Nothing backs off (`draft_cost=0`).

`speed`: turns are interleaved, medians count. `big` has 336 million parameters with random weights
in which all layers but the first add nothing to the residual stream, and a drafter that is its
first layer: they agree *by construction*, while the target's forward costs what 336 million
parameters cost. `embedded` is the pair as it is.

`costs`: guided texts with a constant `draft_cost` and with the measured one, which is known before
the turns begin.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from cfg_core.policy.draft_length import DRAFT_COST
from models.training.measure import TOPIC_NAMES, negative_ids, prompt_ids

from ..llm import STORIES, guidance, guided_llm
from ..peer import guided_generate
from ..report import Report, parser
from ..turns import take_turns

DRAFT = STORIES.with_name("stories-draft")
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
) -> Any:
    options: dict[str, Any] = {}
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
    options |= {"max_model_len": 512, "enable_prefix_caching": False}
    return guided_llm(target, draft_cost=draft_cost, **options)


def stats(llm: Any) -> dict[str, int]:
    found: dict[str, int] = llm.llm_engine.engine_core.engine_core.scheduler.guidance_stats()
    return found


# --- acceptance


def stories(
    llm: Any, scale: float, temperature: float, number: int, length: int
) -> tuple[list[Any], list[Any]]:
    """Prompts and parameters: stories about the model's topics, away from none."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts, params = [], []
    for i in range(number):
        topic = TOPIC_NAMES[i % len(TOPIC_NAMES)]
        extra = None
        if scale != 1:
            negative = negative_ids(tokenizer, "completion", "free", topic)
            extra = guidance(scale, negative)
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
    before, kind = stats(llm), "plain" if load["scale"] == 1 else "guided"
    prompts, params = stories(llm, **load)
    with nullcontext() if guided_drafts else leaders_draft_alone(llm):
        llm.generate(prompts, params, use_tqdm=False)
    steps, drafts, accepted = (
        stats(llm)[f"{kind}_{name}"] - before[f"{kind}_{name}"]
        for name in ("draft_steps", "drafts", "drafts_accepted")
    )
    return {"drafts": drafts, "kept": accepted / drafts, "tokens_per_step": 1 + accepted / steps}


@contextmanager
def leaders_draft_alone(llm: Any) -> Iterator[None]:
    """Let each group's drafts be those of its leader, which the negative does not change."""
    from cfg_core.vllm_plugin.worker.drafter_v1 import GuidedProposer, sample_seeded

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter = worker.model_runner.drafter

    def unblended(hidden_states: torch.Tensor, sampling: Any) -> Any:
        tokens, probs = super(GuidedProposer, drafter)._sample_draft_tokens(hidden_states, sampling)
        if probs is not None:
            sample_seeded(tokens, probs, sampling)
        if drafter.guidance.rows is not None:
            drafter.guidance.rows.copy_to_followers(tokens.view(-1, 1))
        return tokens, probs

    drafter._sample_draft_tokens = unblended
    try:
        yield
    finally:
        del drafter._sample_draft_tokens


def acceptance(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    # All stay alive to the end: vLLM's one set of process groups goes with the first engine.
    subjects = {
        "embedded pair": engine(STORIES, DRAFT, draft_cost=0),
        "target drafts for itself": engine(STORIES, STORIES, draft_cost=0),
    }
    rows = []
    report.head(
        *("drafter", "temperature", "scale", "kept, drafts unguided", "kept, drafts guided"),
        "tokens a step",
    )
    for (name, llm), temperature, scale in product(subjects.items(), (0.0, 1.0), SCALES):
        load = {"scale": scale, "temperature": temperature, "number": args.stories, "length": 80}
        without, with_ = (kept(llm, guided, **load) for guided in (False, True))
        row = {"drafter": name, "temperature": temperature, "scale": scale}
        rows.append({**row, "unguided": without, "guided": with_})
        shares = (f"{found['kept']:.1%}" for found in (without, with_))
        steps = f"{without['tokens_per_step']:.2f} -> {with_['tokens_per_step']:.2f}"
        report.row(name, f"{temperature:g}", f"{scale:g}", *shares, steps)
    return rows


# --- speed


def big_pair(
    folder: Path, layers: int = 20, hidden: int = 1024, ffn: int = 4096
) -> tuple[Path, Path]:
    """A target whose layers behind the first add nothing, and its first layer as the drafter."""
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
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


def speed(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        target, draft = (STORIES, DRAFT) if args.model == "embedded" else big_pair(Path(folder))
        without = engine(target, None)
        drafting = engine(target, draft, draft_cost=args.draft_cost, by_batch=True)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        rows = []
        report.head(
            *("batch", "plain", "plain + drafts", "guided", "guided + drafts", "HF guided"),
            *("guided + drafts : plain", ": guided", "drafts kept"),
        )
        for batch in BATCHES:
            length = args.tokens if batch < max(BATCHES) else args.tokens // 2
            load: dict[str, Any] = {"temperature": 0.0, "number": batch, "length": length}
            ways: dict[str, Callable[[], float]] = {
                "plain": partial(rate, without, scale=1.0, **load),
                "plain + drafts": partial(rate, drafting, scale=1.0, **load),
                "guided": partial(rate, without, scale=args.scale, **load),
                "guided + drafts": partial(rate, drafting, scale=args.scale, **load),
                "HF guided": partial(hf_rate, model, without, scale=args.scale, **load),
            }
            before = stats(drafting)
            turns = take_turns(ways, args.turns)
            drafts, accepted = (
                stats(drafting)[k] - before[k] for k in ("guided_drafts", "guided_drafts_accepted")
            )
            row = turns.medians()
            ratios = {to: turns.ratio("guided + drafts", to) for to in ("plain", "guided")}
            share = accepted / drafts if drafts else None
            told = {"ratios": ratios, "kept": share, "turns": turns.took}
            rows.append({"batch": batch, **row, **told})
            report.row(
                batch,
                *(f"{value:.1f}" for value in row.values()),
                *(f"{value:.2f}" for value in ratios.values()),
                "none made" if share is None else f"{share:.1%}",
            )
        return rows


def costs(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        target, draft = (STORIES, DRAFT) if args.model == "embedded" else big_pair(Path(folder))
        without, measuring = engine(target, None), engine(target, draft)
        constant = engine(target, draft, draft_cost=DRAFT_COST)
    rows = []
    report.head(
        "batch", "no drafts", f"cost {DRAFT_COST:g}", "measured", "of", ": none", ": const."
    )
    for batch in BATCHES:
        load: dict[str, Any] = {"temperature": 0.0, "number": batch, "length": args.tokens}
        cost = known_cost(measuring, 2 * batch, scale=args.scale, **load)
        engines = {"no drafts": without, "constant": constant, "measured": measuring}
        ways = {name: partial(rate, llm, scale=args.scale, **load) for name, llm in engines.items()}
        turns = take_turns(ways, args.turns)
        ratios = {to: turns.ratio("measured", to) for to in ("no drafts", "constant")}
        row = turns.medians()
        rows.append({"batch": batch, **row, "cost": cost, "ratios": ratios, "turns": turns.took})
        none, const, measured = (f"{value:.1f}" for value in row.values())
        told = (f"{value:.2f}" for value in (cost, *ratios.values()))
        report.row(batch, none, const, measured, *told)
    return rows


def known_cost(llm: Any, streams: int, **load: Any) -> float:
    """What a draft costs in steps of so many streams, after as many texts as it takes to know it.

    Raises RuntimeError if it does not become known.
    """
    name = f"draft_cost_milli_from_{1 << streams.bit_length() - 1}"
    for _ in range(60):
        rate(llm, **load)
        if name in stats(llm):
            return stats(llm)[name] / 1000
    raise RuntimeError(f"the cost of a draft at {streams} streams is not known after 60 loads")


def rate(llm: Any, **load: Any) -> float:
    """Output tokens/s."""
    prompts, params = stories(llm, **load)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)


def hf_rate(model: Any, llm: Any, **load: Any) -> float:
    """Output tokens/s of transformers, with the same prompts in one padded batch."""
    prompts, params = stories(llm, **load)
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    negatives = [one.extra_args["negative_prompt_token_ids"] for one in params]
    start = time.perf_counter()
    made = guided_generate(model, ids, negatives, load["scale"], load["length"])
    return sum(map(len, made)) / (time.perf_counter() - start)


def main() -> None:
    options = parser(__doc__)
    parts = {"acceptance": acceptance, "speed": speed, "costs": costs}
    options.add_argument("part", choices=tuple(parts), nargs="?", default="acceptance")
    options.add_argument("model", choices=("big", "embedded"), nargs="?", default="embedded")
    options.add_argument(
        "--stories", type=int, default=60, help="texts of 80 tokens for each share of drafts kept"
    )
    options.add_argument("--scale", type=float, default=1.5, help="of the speed table")
    options.add_argument(
        "--tokens", type=int, default=64, help="a text; half of it in the largest batch"
    )
    options.add_argument(
        "--draft-cost", type=float, help="of the speed table, see configs/cfg-speculative.yaml"
    )
    options.add_argument("--turns", type=int, default=3)
    args = options.parse_args()
    report = Report(f"speculation {args.part}", args)
    report.end(rows=parts[args.part](args, report))


if __name__ == "__main__":
    main()
