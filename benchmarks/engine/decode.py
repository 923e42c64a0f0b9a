"""Decoding: what a step of guided groups costs, against the plain streams that they are made of.

    python benchmarks/bench_decode.py [--batches 1 4 16 32] [--turns 8]
        [--model chat|stories|300m|1b|8b] [--sampling greedy top-p] [--negatives 1 48 256]
        [--peers transformers client]

The physics. A decode step reads all weights once, whatever the batch, and computes about
2 x parameters FLOPs for each stream. `bound` is the larger of the two times for 2B streams, from
rates that are measured here (physics.py). A group of two streams does the forward pass of two plain
requests, so a step of B groups should take as long as one of 2B plain requests:

    parity = step(2B plain) / step(B groups) = 1

It may be more than 1: a group needs one row of the head, one sample and one text, where two plain
requests need two of each. It is less than 1 if the blend and its bookkeeping cost more than that.

What is timed is `LLMEngine.step`, scheduler, model, sampling and text included. On a CPU, one
process with one thread does it. On a GPU, the engine has its own process, CUDA graphs and async
scheduling, as it comes. A load is a batch of texts of `--tokens` tokens; its time is the median of
its steps, without prompts. The loads take turns in one engine, in changing order, and ratios are
taken within a turn, because the machine's speed changes. Prompts and negatives are random tokens.
`300m`, `1b` and `8b` are Llamas with random weights. The last two have the shapes of Llama 3, need
a GPU, and have no tokenizer, so their tokens are not made text.

`top-p` samples at temperature 0.8 with top-p 0.95. Peers, on the same thread:

- `transformers`: guided `generate` of Hugging Face transformers on the same batch. The difference
  of two texts of different length is timed, so that prompts do not count.
- `client`: what a client can do itself without guidance in the engine. For each token it sends both
  prompts with `max_tokens` 1 and `logprobs` 20, and merges what it gets. Prefixes are cached, and
  calls are in this process, so HTTP would come on top. It cannot see beyond 20 tokens.

Prints a card, a table of medians with ranges, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the engine cannot be forked

import torch  # noqa: E402

CUDA = torch.cuda.is_available()
ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
for name, value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    **({} if CUDA else ON_CPU),
}.items():
    os.environ.setdefault(name, value)

from card import card, vllm_version  # noqa: E402
from physics import Rates, measure  # noqa: E402
from safetensors import safe_open  # noqa: E402

CHAT = ROOT / "models" / "SmolLM2-135M-Instruct"
MODELS = {"chat": CHAT, "stories": ROOT / "models" / "stories"}
LARGER = "300m"
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
"""Those of Llama 3. vLLM fills in the weights (`load_format: dummy`)."""
SCALE = 1.5
FIRST_ID = 100
"""Token ids below are special."""
SKIPPED = 2
"""Steps at both ends of a text that are not timed: prompts at its beginning, and its end."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
PEER_TOKENS = (4, 20)
"""Lengths of the two texts whose difference is timed."""
CLIENT_TOKENS = 6
LOGPROBS = 20
"""The most that a client may ask for by default."""


def make_larger(folder: Path) -> Path:
    """A Llama of 336 million random weights, with the chat model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(CHAT))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=22,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_shape(folder: Path, name: str) -> Path:
    """A configuration without weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=128256,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=name == "1b",
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **SHAPES[name],
    ).save_pretrained(folder)
    return folder


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Engine arguments of this device, and of a model without weights."""
    options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    if CUDA:
        sizes = {size for batch in args.batches for size in (batch, 2 * batch)}
        options = {
            "kv_cache_memory_bytes": 12 << 30,
            "gpu_memory_utilization": 0.6,
            "cudagraph_capture_sizes": sorted(sizes),
        }
    if args.model in SHAPES:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    return options


class Bench:
    """One engine, and loads of random prompts."""

    sampling = "greedy"

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        from vllm import LLM

        from cfg_core.vllm_plugin import guided_engine_args

        self._args, self._model = args, model
        self._random = random.Random(0)
        longest = max(args.prompt, *args.negatives) + args.tokens
        self._llm = LLM(
            str(model),
            dtype=args.dtype,
            max_model_len=max(256, longest),
            max_num_seqs=2 * max(args.batches),
            max_num_batched_tokens=4096,
            **engine_options(args),
            **guided_engine_args(),
        )
        self._engine = self._llm.llm_engine
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._requests = 0
        self._peer: Any = None

    def sizes(self) -> dict[str, int]:
        """Parameters of the model, and their bytes. A head that shares its weights counts once."""
        weights = 0
        if self._args.model in SHAPES:
            weights = parameters_of(self._model)
            return {"parameters": weights, "bytes": 2 * weights}
        for path in self._model.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                weights += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        width = torch.empty(0, dtype=getattr(torch, self._args.dtype)).element_size()
        return {"parameters": weights, "bytes": weights * width}

    def step_s(self, requests: int, negative: int) -> tuple[float, float]:
        """Seconds, and CPU-seconds, of the median decode step of that many requests.

        negative: tokens of each negative. 0: the requests are plain.
        """
        timed = slice(SKIPPED, -SKIPPED)
        wall, cpu = (clock[timed] for clock in self.steps(requests, negative))
        return statistics.median(wall), statistics.median(cpu)

    def steps(self, requests: int, negative: int) -> tuple[list[float], list[float]]:
        """Seconds, and CPU-seconds, of each step of that many requests."""
        for _ in range(requests):
            self._add(negative)
        wall, cpu = [], []
        while self._engine.has_unfinished_requests():
            start, cpu_start = time.perf_counter(), time.process_time()
            self._engine.step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        return wall, cpu

    def _add(self, negative: int) -> None:
        from vllm import SamplingParams

        args, extra = self._args, None
        if negative:
            ids = self._ids(negative)
            extra = {"guidance_scale": SCALE, "negative_prompt_token_ids": ids}
        params = SamplingParams(
            max_tokens=args.tokens,
            ignore_eos=True,
            detokenize=args.model not in SHAPES,
            extra_args=extra,
            **SAMPLINGS[self.sampling],
        )
        self._send(self._ids(args.prompt), params)

    def _send(self, ids: list[int], params: Any) -> str:
        self._requests += 1
        prompt: Any = {"prompt_token_ids": ids}
        self._engine.add_request(str(self._requests), prompt, params)
        return str(self._requests)

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, self._vocabulary) for _ in range(length)]

    def client_s(self, groups: int, negative: int) -> float:
        """Seconds of a token of a client that merges two plain requests for each group."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=LOGPROBS)
        pairs = [(self._ids(self._args.prompt), self._ids(negative)) for _ in range(groups)]
        took = []
        for _ in range(CLIENT_TOKENS):
            start = time.perf_counter()
            names = [[self._send(ids, params) for ids in pair] for pair in pairs]
            found: dict[str, dict[int, float]] = {}
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    rows: Any = output.outputs[0].logprobs[0]
                    found[output.request_id] = {i: row.logprob for i, row in rows.items()}
            for pair, (leader, follower) in zip(pairs, names, strict=True):
                token = merged(found[leader], found[follower])
                for ids in pair:
                    ids.append(token)
            took.append(time.perf_counter() - start)
        return statistics.median(took[1:])

    def transformers_s(self, requests: int, negative: int) -> float:
        """Seconds of a step of transformers' guided `generate` on a batch of that many prompts."""
        from transformers import AutoConfig, AutoModelForCausalLM

        device = "cuda" if CUDA else "cpu"
        if self._peer is None:
            dtype = getattr(torch, self._args.dtype)
            if self._args.model in SHAPES:
                config = AutoConfig.from_pretrained(str(self._model))
                with torch.device(device):
                    loaded = AutoModelForCausalLM.from_config(config, dtype=dtype)
            else:
                loaded = AutoModelForCausalLM.from_pretrained(str(self._model), dtype=dtype)
            self._peer = loaded.to(device).eval()
        prompts = torch.tensor([self._ids(self._args.prompt) for _ in range(requests)])
        negatives = torch.tensor([self._ids(negative) for _ in range(requests)])
        prompts, negatives = prompts.to(device), negatives.to(device)
        options: dict[str, Any] = {"do_sample": False}
        if self.sampling == "top-p":
            options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
        took = []
        for tokens in PEER_TOKENS:
            start = time.perf_counter()
            self._peer.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                negative_prompt_ids=negatives,
                negative_prompt_attention_mask=torch.ones_like(negatives),
                guidance_scale=SCALE,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                **options,
            )
            if CUDA:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        return (took[1] - took[0]) / (PEER_TOKENS[1] - PEER_TOKENS[0])

    def row(self, batch: int, negative: int) -> dict[str, Any]:
        """Medians of all turns for `batch` groups, in ms and as ratios."""
        loads = {
            "plain(B)": (batch, 0),
            "guided(B)": (batch, negative),
            "plain(2B)": (2 * batch, 0),
        }
        peers = {"transformers": self.transformers_s, "client": self.client_s}
        turns: list[dict[str, tuple[float, float]]] = []
        for turn in range(self._args.turns + 1):
            names = list(loads) if turn % 2 else list(reversed(loads))
            took = {name: self.step_s(*loads[name]) for name in names}
            for peer in self._args.peers:
                took[peer] = (peers[peer](batch, negative), 0.0)
            turns.append(took)
        del turns[0]  # warms up

        def ratios(of: str, to: str, clock: int = 0) -> list[float]:
            return [turn[of][clock] / turn[to][clock] for turn in turns]

        parities = ratios("plain(2B)", "guided(B)")
        return {
            "sampling": self.sampling,
            "batch": batch,
            "negative": negative,
            "ms": {name: 1000 * statistics.median(t[name][0] for t in turns) for name in turns[0]},
            "parity": statistics.median(parities),
            "parity_range": [min(parities), max(parities)],
            "parity_cpu": statistics.median(ratios("plain(2B)", "guided(B)", 1)),
            "of_plain": statistics.median(ratios("plain(B)", "guided(B)")),
            "of_peers": {
                peer: statistics.median(ratios(peer, "guided(B)")) for peer in self._args.peers
            },
        }


def merged(leader: dict[int, float], follower: dict[int, float]) -> int:
    """The likeliest token of the blend, of those that both rows tell; else the leader's."""
    both = leader.keys() & follower.keys()
    blend = {i: follower[i] + SCALE * (leader[i] - follower[i]) for i in both} or leader
    return max(blend, key=blend.__getitem__)


def table_row(row: dict[str, Any], bound_s: float) -> str:
    ms, (low, high) = row["ms"], row["parity_range"]
    peers = [f"{name} {ms[name]:.0f}, {times:.1f}" for name, times in row["of_peers"].items()]
    cells = [
        row["sampling"],
        str(row["batch"]),
        str(row["negative"]),
        *(f"{ms[name]:.1f}" for name in ("plain(B)", "guided(B)", "plain(2B)")),
        f"{1000 * bound_s:.1f}",
        f"{row['parity']:.3f} ({low:.2f} to {high:.2f})",
        f"{row['parity_cpu']:.3f}",
        f"{row['of_plain']:.2f}",
        "; ".join(peers) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def headline(rows: list[dict[str, Any]]) -> str:
    """The tokens per second of the guided requests, as a part of those of plain ones."""
    parts = (
        f"B={row['batch']} {row['of_plain']:.2f}, {row['parity']:.2f} of half of 2B" for row in rows
    )
    return f"of plain(B): {'; '.join(parts)}"


HEADER = """\
| sampling | B | negative | plain(B), ms | guided(B), ms | plain(2B), ms | bound, ms \
| parity (range) | of CPU time | tokens/s, of plain(B) | peers: ms, times slower |
|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*MODELS, LARGER, *SHAPES], default="chat")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--negatives", type=int, nargs="+", default=[48], help="their tokens")
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=["greedy"])
    parser.add_argument("--peers", nargs="+", choices=["transformers", "client"], default=[])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_steps(args, model_of(args.model, Path(folder)))


def model_of(name: str, folder: Path) -> Path:
    if name in SHAPES:
        return make_shape(folder, name)
    return MODELS.get(name) or make_larger(folder)


def parameters_of(model: Path) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(model)))
    return sum(weight.numel() for weight in made.parameters())


def measure_steps(args: argparse.Namespace, model: Path) -> None:
    bench = Bench(args, model)
    rates: Rates = measure(getattr(torch, args.dtype))
    torch.cuda.empty_cache()
    sizes = bench.sizes()
    described = {
        **card(),
        "vllm": vllm_version(),
        "threads": torch.get_num_threads(),
        **sizes,
        "read_gb_s": round(rates.bytes_s / 1e9, 1),
        "gemm_gflop_s": round(rates.flop_s / 1e9),
    }
    print(json.dumps(described))
    print(HEADER)
    rows = []
    for bench.sampling, batch, negative in product(args.sampling, args.batches, args.negatives):
        row = bench.row(batch, negative)
        bound_s = rates.step_s(sizes["bytes"], sizes["parameters"], 2 * batch)
        rows.append({**row, "bound_ms": 1000 * bound_s})
        print(table_row(row, bound_s), flush=True)
    options = {key: value for key, value in vars(args).items() if key != "out"}
    told = {"benchmark": "decode", "headline": headline(rows), "card": described}
    result = json.dumps({**told, **options, "rows": rows})
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
