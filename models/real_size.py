"""A tiny Llama with the vocabulary, the positions and the tokenizer of a large one.

    python models/real_size.py [VOCABULARY]     make it, if need be, and print its folder

Real models have vocabularies of 128,000 to 262,144 tokens and read 131,072 of them. What the host
does for a request may grow with either: masks of grammars, tables of a tokenizer, lists of ids. To
see that, a model needs the sizes and not the quality of a large one. This one has one layer and
random weights, and is made in about twenty seconds, without a network. Its text is nonsense.

- The tokenizer is a byte-level BPE, trained on made-up words of several scripts and on the standard
  library of this Python. So it has long words, code, and pieces of characters, as real ones have.
- Tags of tool calls and of reasoning are tokens, but not special ones: they stay in decoded text,
  as in Qwen's tokenizers. The chat template writes tools and calls as Qwen's do ("hermes").
- The weights are drawn as in tests/engine/tiny_models.py, so that attention picks tokens, greedy
  text does not repeat itself, and the gaps between logits are large against rounding.

`real_size_model` keeps what was made in models/.real-size, under a name that changes with this
file, with Python, and with the packages that make it.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import random
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 151_936
"""That of Qwen2 and Qwen3."""
LARGEST_VOCABULARY = 262_144
"""That of Gemma 3."""
POSITIONS = 131_072
HIDDEN, HEADS, HEAD_DIM = 64, 2, 32
HEAD_STD = 5.0
"""Standard deviation of the logits."""

CACHE = Path(__file__).resolve().parent / ".real-size"

BOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (BOS, START, END)
"""The first token ids, in this order."""
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""The last token ids, in this order."""

CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
    {{ '<|im_start|>system\n' + system }}
    {%- if tools -%}
        {{ '\n\n# Tools\nCall a function with JSON in <tool_call></tool_call> tags: ' }}
        {{- '{"name": ..., "arguments": {...}}\n<tools>\n' }}
        {%- for tool in tools -%}
            {{ (tool | tojson) + '\n' }}
        {%- endfor -%}
        {{ '</tools>' }}
    {%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in (messages[1:] if system else messages) -%}
    {%- if message.role == 'tool' -%}
        {{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else -%}
        {{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] -%}
            {{ '\n<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""

LETTERS = {
    "latin": ("bcdfghjklmnprstvwz", "aeiou"),
    "cyrillic": ("бвгджзклмнпрстфхцчш", "аеиоуыэюя"),
    "greek": ("βγδζθκλμνξπρστφχψ", "αεηιουω"),
    "devanagari": ("कखगचजटडतदनपबमयरलवसह", "ािीुूेैोौ"),
}
"""Of each script, consonants and vowels."""
IDEOGRAPHS = (0x4E00, 0x9FA5)
SHARES = {"latin": 12, "cyrillic": 2, "greek": 1, "devanagari": 1, "ideographs": 2}
"""Weights with which the script of a word is drawn."""
WORDS_PER_TOKEN = 1.2
"""Made-up words for each token of the vocabulary: enough for so many merges."""
LINE = 50
"""Words in a line of the corpus."""


def real_size_model(vocabulary: int = VOCABULARY) -> Path:
    """Return the folder of the model with `vocabulary` tokens, which is made if it is not there.

    Several processes may ask at the same time: one makes it, and the others wait.
    """
    folder = CACHE / f"{vocabulary}-{_fingerprint()}"
    with _locked(CACHE / f"{vocabulary}.lock"):
        if not folder.is_dir():
            for outdated in CACHE.glob(f"{vocabulary}-*"):
                shutil.rmtree(outdated)
            with tempfile.TemporaryDirectory(dir=CACHE) as made:
                make_model(Path(made) / "model", vocabulary)
                os.rename(Path(made) / "model", folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file, which the system releases if the process dies."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint() -> str:
    """Of everything that the model is made from."""
    packages = [f"{name} {version(name)}" for name in ("tokenizers", "transformers")]
    made_from = (Path(__file__).read_text("utf-8"), sys.version, *packages)
    return hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:12]


def make_model(folder: Path, vocabulary: int) -> None:
    """Write the model and its tokenizer to a folder. `vocabulary` is the size of both."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(vocabulary).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_theta=1e6,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(BOS),
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_drawn(name, weight, generator))
    model.save_pretrained(folder)


def _drawn(name: str, weight: Tensor, generator: Any) -> Tensor:
    """Random values for a parameter: see tests/engine/tiny_models.py."""
    import torch

    noise = torch.randn(weight.shape, generator=generator)
    if weight.dim() == 1:
        return 1 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    gain = {"lm_head.weight": HEAD_STD}.get(name, 3.0 if "q_proj" in name else 1.0)
    return gain * noise / math.sqrt(weight.shape[-1])


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of exactly so many tokens. Raises ValueError if the corpus is too small.

    It is the same in each call.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus(round(WORDS_PER_TOKEN * vocabulary)), trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    if core.get_vocab_size() != vocabulary:
        raise ValueError(f"The corpus gave {core.get_vocab_size()} tokens instead of {vocabulary}.")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END,
        pad_token=BOS,
        model_max_length=POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def corpus(num_words: int) -> Iterator[str]:
    """Lines of made-up words and numbers, and then source files of the standard library."""
    rng = random.Random(0)
    scripts, weights = list(SHARES), list(SHARES.values())
    for _ in range(num_words // LINE):
        words = [_word(rng, script) for script in rng.choices(scripts, weights, k=LINE)]
        yield f"{' '.join(words)}. {rng.random()}"
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text("utf-8", errors="replace")


def _word(rng: random.Random, script: str) -> str:
    if script == "ideographs":
        return "".join(chr(rng.randint(*IDEOGRAPHS)) for _ in range(rng.randint(1, 3)))
    consonants, vowels = LETTERS[script]
    syllables = [rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(1, 4))]
    word = "".join(syllables) + rng.choice(("", rng.choice(consonants)))
    return word.capitalize() if rng.random() < 0.2 else word


if __name__ == "__main__":
    print(real_size_model(*map(int, sys.argv[1:])))
