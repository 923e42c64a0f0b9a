"""Causal language models that score pairs by the logits of yes and no.

The oracles are the code of Qwen3-Reranker's model card and sentence-transformers' CrossEncoder.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.oracle import oracle_packages
from cfg_core.errors import ConfigError, RequestError
from cfg_core.prefill_only import Engine
from tests.encoders import tiny_checkpoints as tiny

with oracle_packages():
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

QUERY = "What is the capital of China?"
DOCUMENTS = [
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies\ntowards each other.",
    "No.",
    "  spaces around \u00e9t\u00e9  ",
    "A longer document. " * 12,
]
INSTRUCTION = "Given a question, find passages in a log of the sea"
SPLIT = (  # how Qwen2 and Qwen3 split text before byte pairs
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') |"
    " first -%}"
    "{%- set document = messages | selectattr('role', 'eq', 'document') |"
    " map(attribute='content') | first -%}"
    "<|im_start|>user\n"
    "{%- if messages[0].role == 'system' %}\n<Instruct>: {{ messages[0].content }}{% endif %}\n"
    "query: {{ query }}\ndocument: {{ document }}<|im_end|>\n<|im_start|>assistant\n"
)


def chat_tokenizer() -> Tokenizer:
    """Byte pairs as Qwen3 has them, learnt from this file's texts. `yes` and `no` are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [*DOCUMENTS, QUERY, INSTRUCTION, "yes\nno\n" * 20, "judge document query instruct" * 3]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def save_reranker(path: Path, kind: str = "qwen3", auto=transformers.AutoModelForCausalLM) -> Path:
    torch.manual_seed(11)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny.config_of(
        kind, max_position_embeddings=900, tie_word_embeddings=True, num_labels=1
    )
    tiny.save(path, auto.from_config(config))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=chat_tokenizer(), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return save_reranker(tmp_path_factory.mktemp("hub") / "models--Qwen--Qwen3-Reranker-0.6B" / "a")


def published_scores(path: Path, pairs, instruction: str | None = None, max_length: int = 8192):
    """The scores of the model card's code: left padding, log-softmax over the two logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    task = instruction or (
        "Given a web search query, retrieve relevant passages that answer the query"
    )
    texts = [f"<Instruct>: {task}\n<Query>: {q}\n<Document>: {d}" for q, d in pairs]
    inner = tokenizer(
        texts,
        truncation="longest_first",
        max_length=max_length - len(before) - len(after),
    )["input_ids"]
    batch = tokenizer.pad(
        {"input_ids": [before + ids + after for ids in inner]}, return_tensors="pt"
    )
    with torch.inference_mode():
        last = model(**batch).logits[:, -1, :]
    return torch.stack([last[:, no], last[:, yes]], 1).log_softmax(1)[:, 1].exp().numpy()


@pytest.mark.parametrize("instruction", [None, INSTRUCTION])
def test_the_published_template(qwen3, instruction):
    expected = published_scores(qwen3, [(QUERY, text) for text in DOCUMENTS], instruction)
    with Engine.load(qwen3, dtype="float32") as engine:
        assert engine.info.tasks == ("classify",)
        assert engine.info.takes_pairs
        assert engine.info.takes_instruction
        assert engine.info.labels == ("yes",)
        scores = engine.rerank(QUERY, DOCUMENTS, instruction=instruction)
        backwards = engine.rerank(QUERY, DOCUMENTS[::-1], instruction=instruction)[::-1]
        raw = engine.rerank(QUERY, DOCUMENTS, instruction=instruction, raw_scores=True)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(backwards, expected, atol=1e-5)
    np.testing.assert_allclose(raw, np.log(expected / (1 - expected)), atol=1e-4)
    assert (scores.argsort() == expected.argsort()).all()
    assert np.ptp(scores) > 0.01, "the scores of the documents must differ"


def test_the_instruction_matters_and_can_be_configured(qwen3):
    with (
        Engine.load(qwen3, dtype="float32") as usual,
        Engine.load(qwen3, dtype="float32", instruction=INSTRUCTION) as configured,
    ):
        asked = usual.rerank(QUERY, DOCUMENTS, instruction=INSTRUCTION)
        np.testing.assert_array_equal(configured.rerank(QUERY, DOCUMENTS), asked)
        assert np.abs(usual.rerank(QUERY, DOCUMENTS) - asked).max() > 1e-4


def test_bfloat16(qwen3):
    with Engine.load(qwen3, dtype="bfloat16") as half, Engine.load(qwen3, dtype="float32") as whole:
        scores = half.rerank(QUERY, DOCUMENTS)
        np.testing.assert_allclose(scores, whole.rerank(QUERY, DOCUMENTS), atol=0.02)


def test_truncation_cuts_the_document_only(qwen3):
    text = "A longer document. " * 200
    with Engine.load(qwen3, dtype="float32", max_input_tokens=700) as engine:
        expected = published_scores(qwen3, [(QUERY, text)], max_length=700)
        np.testing.assert_allclose(engine.rerank(QUERY, [text], truncate=True), expected, atol=1e-5)
        with pytest.raises(RequestError, match="this model takes 700"):
            engine.rerank(QUERY, [text])
        with pytest.raises(RequestError, match="tokens without its document, and 700 are to be"):
            engine.rerank(text, [text], truncate=True)


def test_what_has_no_sense_is_refused(qwen3):
    with Engine.load(qwen3, dtype="float32") as engine:
        with pytest.raises(RequestError, match="is a single text"):
            engine.classify(["a text"])
        formatted = "<|im_start|>system\nJudge whether the Document meets the requirements based"
        formatted += " on the Query and the Instruct provided. Note that the answer can only be"
        formatted += ' "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: x\n<Query>: y'
        with pytest.raises(RequestError, match="already holds the prompt"):
            engine.rerank(formatted, DOCUMENTS)


def test_a_plain_language_model_is_not_an_embedder(tmp_path):
    path = save_reranker(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"`pooling: last` .* `classifier_from_token: \["):
        Engine.load(path)
    with Engine.load(path, dtype="float32", pooling="last") as engine:
        assert engine.info.tasks == ("embed", "token_embed")
    with pytest.raises(ConfigError, match="set `score_template`"):
        Engine.load(path, classifier_from_token=["no", "yes"])
    with pytest.raises(ConfigError, match="'maybe so', which is no token"):
        Engine.load(
            path, classifier_from_token=["no", "maybe so"], score_template="{query}{document}"
        )


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral"])
def test_a_template_of_ones_own(kind, tmp_path):
    path = save_reranker(tmp_path / kind, kind)
    template = "{instruction} A: {query}\nB: {document}\nAnswer:"
    settings = {"score_template": template, "instruction": "Does B answer A?", "dtype": "float32"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    expected = []
    for text in DOCUMENTS:
        prompt = f"Does B answer A? A: {QUERY}\nB: {text}\nAnswer:"
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            expected.append(model(input_ids=ids).logits[0, -1].numpy())
    expected = np.stack(expected)
    with Engine.load(path, classifier_from_token=["no", "yes"], **settings) as two:
        raw = two.rerank(QUERY, DOCUMENTS, raw_scores=True)
    np.testing.assert_allclose(raw, expected[:, yes] - expected[:, no], atol=2e-4)
    with Engine.load(path, classifier_from_token=["yes"], **settings) as one:
        raw = one.rerank(QUERY, DOCUMENTS, raw_scores=True)
    np.testing.assert_allclose(raw, expected[:, yes], atol=2e-4)


def test_a_sequence_classifier_with_a_template(tmp_path):
    auto = transformers.AutoModelForSequenceClassification
    path = save_reranker(tmp_path / "seq-cls", auto=auto)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = auto.from_pretrained(path).eval()
    ids = [tokenizer(f"q: {QUERY} d: {d}", return_tensors="pt")["input_ids"] for d in DOCUMENTS]
    with torch.inference_mode():
        expected = [float(model(input_ids=row).logits[0, 0]) for row in ids]
    template = "q: {query} d: {document}"
    with Engine.load(path, dtype="float32", score_template=template) as engine:
        scores = engine.rerank(QUERY, DOCUMENTS, raw_scores=True)
        with pytest.raises(RequestError, match="without instructions"):
            engine.rerank(QUERY, DOCUMENTS, instruction="x")
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def save_with_sentence_transformers(folder: Path, base: Path, template: str) -> CrossEncoder:
    """A reranker as sentence-transformers saves it, with this chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(base)
    transformer = Transformer(str(base), transformer_task="text-generation")
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    modules = [transformer, LogitScore(true_token_id=yes, false_token_id=no)]
    oracle = CrossEncoder(modules=modules, device="cpu")
    oracle.save_pretrained(str(folder))
    return oracle


def test_what_sentence_transformers_saves(tmp_path):
    base = save_reranker(tmp_path / "base")
    oracle = save_with_sentence_transformers(tmp_path / "saved", base, CHAT_TEMPLATE)
    pairs = [(QUERY, text) for text in DOCUMENTS]
    with Engine.load(tmp_path / "saved", dtype="float32") as engine:
        np.testing.assert_allclose(
            engine.rerank(QUERY, DOCUMENTS), oracle.predict(pairs), atol=1e-5
        )
        np.testing.assert_allclose(
            engine.rerank(QUERY, DOCUMENTS, instruction=INSTRUCTION),
            oracle.predict(pairs, prompt=INSTRUCTION),
            atol=1e-5,
        )


def test_a_chat_template_that_changes_the_texts_is_refused(tmp_path):
    base = save_reranker(tmp_path / "base")
    template = CHAT_TEMPLATE.replace("{{ document }}", "{{ document | trim }}")
    save_with_sentence_transformers(tmp_path / "saved", base, template)
    with pytest.raises(ConfigError, match="changes the document: set `score_template`"):
        Engine.load(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "modules.json").read_text())
    assert [module["type"].rsplit(".", 1)[-1] for module in config] == ["Transformer", "LogitScore"]
