"""One engine, and loads of random prompts of which all steps are timed.

What is timed is `LLMEngine.step`, scheduler, model, sampling and text included. On a CPU, one
process with one thread does it. On a GPU, the engine has its own process, CUDA graphs and async
scheduling, as it comes. A load is a batch of texts of `tokens` tokens. Prompts and negatives are
random tokens.

`300m`, `0.6b`, `1b` and `8b` are Llamas with random weights. All but `300m` have no tokenizer, so
their tokens are not made text. `0.6b` has the vocabulary of Qwen3, 151,936. `1b` and `8b` have the
shapes of Llama 3, and need a GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..llm import CHAT, STORIES, set_environment

CUDA = torch.cuda.is_available()
if not CUDA:
    set_environment()

EMBEDDED = {"chat": CHAT, "stories": STORIES}
LARGER = "300m"
SHAPES = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "vocab_size": 151936,
    },
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
"""About that of Qwen3-0.6B, and those of Llama 3. vLLM fills in the weights (`load_format:
dummy`)."""
MODELS = (*EMBEDDED, LARGER, *SHAPES)
SCALE = 1.5
FIRST_ID = 100
"""Token ids below are special."""
SKIPPED = 2
"""Steps at both ends of a text that are not timed: prompts at its beginning, and its end."""


def add_options(
    parser: argparse.ArgumentParser, models: Iterable[str], *, tokens: int, turns: int
) -> None:
    """The options that a Bench reads, and `--turns`."""
    parser.add_argument("--model", choices=list(models), default="chat")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each prompt")
    parser.add_argument("--turns", type=int, default=turns)


def model_of(name: str, folder: Path) -> Path:
    """The folder of a model, which is made in `folder` if it is not embedded."""
    if name in SHAPES:
        return _make_shape(folder, name)
    return EMBEDDED.get(name) or _make_larger(folder)


def _make_larger(folder: Path) -> Path:
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


def _make_shape(folder: Path, name: str) -> Path:
    """A configuration without weights."""
    from transformers import LlamaConfig

    shape = {"vocab_size": 128256, "num_attention_heads": 32, **SHAPES[name]}
    LlamaConfig(
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=name != "8b",
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **shape,
    ).save_pretrained(folder)
    return folder


class Bench:
    """One engine.

    args: `model`, `dtype`, `tokens` of a text and `prompt` of its prompt, and the largest of
    `batches` and of `negatives`.
    """

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        from vllm import LLM

        from cfg_core.vllm_plugin import guided_engine_args

        self.args, self._model = args, model
        self._random = random.Random(0)
        longest = max(args.prompt, *args.negatives) + args.tokens
        self.llm = LLM(
            str(model),
            dtype=args.dtype,
            max_model_len=max(256, longest),
            max_num_seqs=2 * max(args.batches),
            max_num_batched_tokens=4096,
            **_engine_options(args),
            **guided_engine_args(),
        )
        self.engine = self.llm.llm_engine
        self._vocabulary = self.engine.model_config.get_vocab_size()
        self._requests = 0

    def sizes(self) -> dict[str, int]:
        """Parameters of the model, and their bytes. A head that shares its weights counts once."""
        width = torch.empty(0, dtype=getattr(torch, self.args.dtype)).element_size()
        if self.args.model in SHAPES:
            weights = sum(weight.numel() for weight in self.in_transformers("meta").parameters())
            return {"parameters": weights, "bytes": weights * width}
        weights = 0
        for path in self._model.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                weights += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        return {"parameters": weights, "bytes": weights * width}

    def in_transformers(self, device: str) -> Any:
        """The model in transformers, with random weights if it has none."""
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = getattr(torch, self.args.dtype)
        if self.args.model in SHAPES:
            config = AutoConfig.from_pretrained(str(self._model))
            with torch.device(device):
                return AutoModelForCausalLM.from_config(config, dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(str(self._model), dtype=dtype).to(device)

    def ids(self, length: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, self._vocabulary) for _ in range(length)]

    def sampling_params(self, guidance: dict[str, Any] | None, **sampling: Any) -> Any:
        """Parameters of a text of `tokens` tokens."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=self.args.tokens,
            ignore_eos=True,
            detokenize=self.args.model not in SHAPES,
            extra_args=guidance,
            **{"temperature": 0.0, **sampling},
        )

    def send(self, ids: list[int], params: Any) -> str:
        """Add a request to the engine; returns its name."""
        self._requests += 1
        prompt: Any = {"prompt_token_ids": ids}
        self.engine.add_request(str(self._requests), prompt, params)
        return str(self._requests)

    def steps(self, params: Sequence[Any], skipped: int = 0) -> tuple[list[float], list[float]]:
        """Seconds, and CPU-seconds, of the timed steps of a request for each of `params`.

        skipped: so many steps more are not timed at the beginning.
        """
        for one in params:
            self.send(self.ids(self.args.prompt), one)
        wall, cpu = [], []
        while self.engine.has_unfinished_requests():
            start, cpu_start = time.perf_counter(), time.process_time()
            self.engine.step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        timed = slice(SKIPPED + skipped, -SKIPPED)
        return wall[timed], cpu[timed]


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
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
