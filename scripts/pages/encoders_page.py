"""Measure every family of encoders against transformers, and write docs/encoders.md.

    python scripts/pages/encoders_page.py

It takes about a minute on one core.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cfg_core.prefill_only import Engine  # noqa: E402
from cfg_core.prefill_only.models.families import BY_RUNS, REASONS  # noqa: E402
from tests.encoders import tiny_checkpoints as tiny  # noqa: E402

PAGE = ROOT / "docs" / "encoders.md"
TEXTS = tiny.random_texts(24, seed=1)

HEAD = """# Encoders
Which architectures the engine for [embeddings](embeddings.md) computes. An encoder that ignores a
bias or a mask gives vectors that look right but are wrong. So an architecture is on the list only
if it is equal to its own code in transformers {version}, and all others are refused with a reason.

Each row is a tiny model. Its random weights are so large that an error changes the vectors. {num}
texts of 1 to 100 tokens are computed in float32, in one packed run, and by transformers with
padding and eager attention. "Cosine" is the least between two vectors of tokens, "difference" the
largest between two components (vectors have a length of about 8), "alone" the largest difference
of a text's mean vector between this batch and a batch of its own. Measured: {date}, by
`python scripts/pages/encoders_page.py`. `tests/encoders` compares poolings, classifiers and
rerankers, too, and what sentence-transformers saves.

"Runs": the model's attention cannot be replaced, so its own forward computes the texts of one
length at a time. That is exact and without padding, but slower where lengths differ much.

| type | models, for example | way | cosine | difference | alone |
|---|---|---|---|---|---|
"""

EXAMPLES = {
    "albert": "paraphrase-albert-small-v2",
    "bert": "all-MiniLM-L6-v2, bge, e5, gte, mxbai-embed-large, arctic-embed (v1)",
    "camembert": "sentence-camembert",
    "data2vec-text": "",
    "deberta": "",
    "deberta-v2": "mxbai-rerank-v1, nli-deberta-v3, mdeberta-v3 classifiers",
    "distilbert": "multi-qa-distilbert, distiluse, splade-v3-distilbert",
    "electra": "ms-marco-electra",
    "embeddinggemma": "embeddinggemma-300m",
    "ernie": "text2vec-base-chinese-paraphrase",
    "eurobert": "EuroBERT",
    "gemma": "",
    "gemma2": "bge-multilingual-gemma2",
    "gemma3_text": "",
    "gte": "gte-multilingual-base (as transformers has it)",
    "jina_embeddings_v3": "jina-embeddings-v3-hf, without its adapters",
    "llama": "LLM2Vec (`is_causal: false`)",
    "megatron-bert": "",
    "ministral3": "",
    "mistral": "e5-mistral, SFR-Embedding, Linq-Embed",
    "modernbert": "gte-modernbert, nomic's modernbert-embed, granite-embedding-r2",
    "mpnet": "all-mpnet-base-v2, multi-qa-mpnet-base",
    "nomic_bert": "nomic-embed-text-v1.5",
    "qwen2": "gte-Qwen2 (`is_causal: false`)",
    "qwen3": "Qwen3-Embedding, Qwen3-Reranker",
    "rembert": "",
    "roberta": "all-distilroberta, nli-roberta",
    "roformer": "",
    "xlm-roberta": "bge-m3, multilingual-e5, bge-reranker-v2-m3, arctic-embed-l-v2.0",
}
"""Well-known models by case. Only their type was tested here, not their weights."""

REFUSED = """
## Long texts
Memory grows with the length of a text, not with its square: windows need no mask over the text
(`tests/encoders/test_memory_of_long_texts.py`). One text, float32, two threads, random weights,
2026-11-28. "More" is the peak beyond what the process had before:

| model | tokens | more | CPU-seconds |
|---|---|---|---|
| ModernBERT, 64 components, 3 layers, window 128 | 8,192 | 37 MiB | 1.7 |
| ModernBERT, 64 components, 3 layers, window 128 | 32,768 | 159 MiB | 16.0 |
| BERT, 64 components, 3 layers | 8,192 | 28 MiB | 1.8 |
| ModernBERT, 768 components, 2 layers, window 128 | 8,192 | 470 MiB | 11.5 |

Layers without a window take time with the square. MPNet keeps a bias over its positions, of which
published models have 514.

## Refused
| type | reason |
|---|---|
"""


def main() -> None:
    """Measure, and write the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    head = HEAD.format(
        version=transformers.__version__, num=len(TEXTS), date=date.today().isoformat()
    )
    rows = "".join(f"| {' | '.join(row)} |\n" for row in measured())
    reasons = {**REASONS, "nomic_bert with experts": "transformers has no experts for this type"}
    refused = "".join(f"| `{kind}` | {reason} |\n" for kind, reason in sorted(reasons.items()))
    PAGE.write_text(head + rows + REFUSED + refused, encoding="utf-8")


def measured() -> Iterator[list[str]]:
    """A row of the table for each case."""
    for case, (kind, _) in sorted(tiny.SETTINGS.items()):
        cosine, difference, alone = errors(case)
        name = f"`{kind}`" if case == kind else f"`{kind}` ({case})"
        way = "runs" if kind in BY_RUNS else "packed"
        figures = [f"{cosine:.6f}", f"{difference:.0e}", f"{alone:.0e}"]
        yield [name, EXAMPLES.get(case, ""), way, *figures]
        print(f"{case:24} {way:8} {' '.join(figures)}", flush=True)


def errors(case: str) -> tuple[float, float, float]:
    """The least cosine and the largest difference to transformers, and the effect of a batch."""
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModel.from_config(tiny.config_of(case))
        path = tiny.save(Path(folder), model)
        expected = tiny.padded_states(path, TEXTS)
        with Engine.load(str(path), dtype="float32") as engine:
            options = engine.options("token_embed", normalize=False)
            found = [output.array("token_embed") for output in engine.run(TEXTS, options)]
            means = engine.embed(TEXTS)
            alone = np.abs(means - np.stack([engine.embed(text) for text in TEXTS])).max()
    pairs = list(zip(found, expected, strict=True))
    cosine = min(float(_cosines(a, b).min()) for a, b in pairs)
    return cosine, max(float(np.abs(a - b).max()) for a, b in pairs), float(alone)


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: np.ndarray = (a * b).sum(1) / lengths
    return cosines


if __name__ == "__main__":
    main()
