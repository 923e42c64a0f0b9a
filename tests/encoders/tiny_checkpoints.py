"""Tiny random checkpoints on disk, one of each family, as transformers saves them.

Each has a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB_SIZE = 400
WORDS = [f"w{chr(97 + i // 12)}{chr(97 + i % 12)}" for i in range(144)]
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_BERT_LIKE = {"type_vocab_size": 2}
_DISENTANGLED = {
    "type_vocab_size": 0,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT_LIKE),
    "roberta": ("roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": ("camembert", {"type_vocab_size": 1, "pad_token_id": 1}),
    "electra": ("electra", {**_BERT_LIKE, "embedding_size": 32}),
    "distilbert": ("distilbert", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "modernbert": ("modernbert", {"local_attention": 16, "global_attn_every_n_layers": 2}),
    "nomic_bert": ("nomic_bert", _BERT_LIKE),
    "gte": ("gte", {"type_vocab_size": 1}),
    "eurobert": ("eurobert", _GROUPED),
    "albert": ("albert", {**_BERT_LIKE, "embedding_size": 32}),
    "data2vec-text": ("data2vec-text", {"type_vocab_size": 1, "pad_token_id": 1}),
    "ernie": ("ernie", _BERT_LIKE),
    "jina_embeddings_v3": ("jina_embeddings_v3", {"type_vocab_size": 1, "pad_token_id": 1}),
    "mpnet": ("mpnet", {"pad_token_id": 1}),
    "roberta-prelayernorm": ("roberta-prelayernorm", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta-xl": ("xlm-roberta-xl", {"type_vocab_size": 1, "pad_token_id": 1}),
    "deberta": ("deberta", _DISENTANGLED),
    "deberta-v2": ("deberta-v2", {**_DISENTANGLED, "position_buckets": 16, "share_att_key": True}),
    "megatron-bert": ("megatron-bert", _BERT_LIKE),
    "rembert": ("rembert", {**_BERT_LIKE, "input_embedding_size": 32}),
    "roformer": ("roformer", _BERT_LIKE),
    "gemma": ("gemma", _GROUPED),
    "gemma2": ("gemma2", {**_GROUPED, "sliding_window": 10}),
    "gemma3_text": ("gemma3_text", {**_GROUPED, "sliding_window": 10, "layer_types": _LAYERS}),
    "embeddinggemma": (
        "gemma3_text",
        {
            **_GROUPED,
            "sliding_window": 10,
            "layer_types": _LAYERS,
            "use_bidirectional_attention": True,
        },
    ),
    "ministral3": ("ministral3", _GROUPED),
    "llama": ("llama", _GROUPED),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
    "mistral-window": ("mistral", {**_GROUPED, "sliding_window": 10}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", _GROUPED),
    "qwen3-window": (
        "qwen3",
        {**_GROUPED, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
}
"""Name of a case: the model type, and the fields that its config needs in addition to the sizes."""


def config_of(case: str, **extra: Any) -> Any:
    kind, settings = SETTINGS[case]
    return transformers.AutoConfig.for_model(kind, **{**_SIZES, **settings, **extra})


def save(path: Path, model: Any) -> Path:
    """The model and its tokenizer.

    The random weights are large, so that every part of the model affects the result.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1)
            elif "bias" in name:
                weight.normal_(0, 0.05)
    model.eval().save_pretrained(path)
    save_tokenizer(path, model.config.pad_token_id, model.config.model_type)
    return path


def save_tokenizer(path: Path, pad_token_id: int = 0, kind: str = "") -> None:
    """Each word is one token: [CLS] text [SEP]. Pairs have token types."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if pad_token_id == 1:
        special[:2] = "[UNK]", "[PAD]"
    tokenizer = _byte_pairs(special) if kind == "qwen2" else _whole_words(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.save_pretrained(path)


def _whole_words(special: list[str]) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(special + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def _byte_pairs(special: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer, because transformers reads every Qwen2 tokenizer as one.

    Its merges make whole words.
    """
    space, letters = "\u0120", sorted(set("".join(WORDS)))
    pairs = sorted({word[:2] for word in WORDS})
    merges = (
        [(a[0], a[1]) for a in pairs]
        + [(word[:2], word[2]) for word in WORDS]
        + [(space, word) for word in WORDS]
    )
    tokens = [*special, space, *letters, *pairs, *WORDS, *(space + word for word in WORDS)]
    return Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="[UNK]")
    )


def sentence_transformers_files(
    path: Path, pooling: str | list[str] = "mean", *, normalize: bool = True, **extra: Any
) -> None:
    """modules.json and 1_Pooling/config.json in the folder of a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    folders = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, folder) in enumerate(zip(kinds, folders, strict=False))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    config = {"embedding_dimension": _SIZES["hidden_size"], "pooling_mode": pooling, **extra}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))


def tiny_bert(folder: Path) -> Path:
    """A sentence-transformers model in `folder`: BERT with random weights from a fixed seed."""
    torch.manual_seed(1)
    save(folder, transformers.AutoModel.from_config(config_of("bert")))
    sentence_transformers_files(folder)
    return folder


def random_texts(num: int, seed: int = 0, longest: int = 100) -> list[str]:
    """Texts of 1 to `longest` words."""
    generator = torch.Generator().manual_seed(seed)

    def number(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    return [
        " ".join(WORDS[number(len(WORDS))] for _ in range(1 + number(longest))) for _ in range(num)
    ]


def padded_states(
    path: Path, texts: list[str], *, auto: Any = transformers.AutoModel, causal: bool | None = None
) -> list[Any]:
    """The token states of each text, from one padded batch computed by transformers only."""
    model = auto.from_pretrained(path, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    arguments = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if causal is False:  # the mask that a bidirectional decoder needs, written out
        hidden = (1.0 - batch["attention_mask"][:, None, None, :].float()) * torch.finfo(
            torch.float32
        ).min
        arguments["attention_mask"] = hidden.expand(-1, 1, hidden.shape[-1], -1)
    if "position_ids" in str(type(model).forward) or causal is False:
        arguments["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    with torch.inference_mode():
        states = model(**arguments).last_hidden_state
    return [
        row[: int(mask.sum())].numpy()
        for row, mask in zip(states, batch["attention_mask"], strict=True)
    ]
