"""Model directories: which are supported, and which are refused with which message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cfg_core.errors import CompatibilityError, ConfigError
from cfg_core.prefill_only.models.checkpoint import Checkpoint, locate, read_checkpoint
from cfg_core.prefill_only.models.families import check_family, is_causal
from cfg_core.prefill_only.models.pair_template import QWEN3_RERANKER
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.stages.input_processor import truncated
from cfg_core.prefill_only.workflow import check_workflow, resolve

BERT = {"model_type": "bert", "architectures": ["BertModel"]}
DEFAULT = EngineOptions()


def write(folder: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict]:
    return [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.x.{kind}"}
        for i, kind in enumerate(kinds)
    ]


def read(folder: Path, files: dict[str, object], options: EngineOptions = DEFAULT) -> Checkpoint:
    return read_checkpoint(write(folder, {"config.json": BERT, **files}), options)


def test_the_files_of_sentence_transformers(tmp_path):
    checkpoint = read(
        tmp_path,
        {
            "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"),
            "1_Pooling/config.json": {
                "pooling_mode_cls_token": True,
                "pooling_mode_max_tokens": True,
            },
            "2_Dense/config.json": {
                "activation_function": "torch.nn.modules.linear.Identity",
                "bias": False,
            },
            "sentence_bert_config.json": {"max_seq_length": 99, "do_lower_case": True},
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "document": ""},
                "default_prompt_name": "query",
            },
        },
    )
    assert checkpoint.poolings == ("cls", "max")
    assert checkpoint.normalize
    assert checkpoint.dense[0].activation == "Identity"
    assert not checkpoint.dense[0].bias
    assert (checkpoint.max_seq_length, checkpoint.lower_case) == (99, True)
    assert (checkpoint.prompts, checkpoint.default_prompt) == ({"query": "query: "}, "query: ")
    assert checkpoint.tasks == ("embed", "token_embed")


@pytest.mark.parametrize(
    ("config", "poolings"),
    [
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["cls", "mean"]}, ("cls", "mean")),
        ({}, ("mean",)),
    ],
)
def test_poolings_in_both_formats(tmp_path, config, poolings):
    files = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": config}
    assert read(tmp_path, files).poolings == poolings


@pytest.mark.parametrize(
    ("config", "poolings"),
    [
        (BERT, ("mean",)),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "is_causal": False},
            ("mean",),
        ),
    ],
)
def test_without_modules(tmp_path, config, poolings):
    assert read(tmp_path, {"config.json": config}).poolings == poolings


CAUSAL_LM = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def test_a_language_model_needs_to_be_told_what_it_computes(tmp_path):
    files = {"config.json": CAUSAL_LM}
    with pytest.raises(ConfigError, match=r"`pooling: last` .* `classifier_from_token"):
        read(tmp_path, files)
    assert read(tmp_path, files, EngineOptions(pooling="last")).poolings == ("last",)
    options = EngineOptions(
        classifier_from_token=["no", "yes"], score_template="{query} {document}"
    )
    checkpoint = read(tmp_path, files, options)
    assert (checkpoint.head, checkpoint.score_tokens) == ("logit_score", ("no", "yes"))
    assert checkpoint.tasks == ("classify",)
    with pytest.raises(ConfigError, match="is no causal language model"):
        read(tmp_path, {"config.json": BERT}, options)


def test_qwen3_reranker_is_known_by_its_name(tmp_path):
    folder = tmp_path / "Qwen3-Reranker-4B"
    checkpoint = read(folder, {"config.json": CAUSAL_LM})
    assert checkpoint.template == QWEN3_RERANKER
    assert (checkpoint.score_tokens, checkpoint.max_seq_length) == (("no", "yes"), 8192)
    configured = read(folder, {"config.json": CAUSAL_LM}, EngineOptions(instruction="Find."))
    assert configured.template.instruction == "Find."
    other = {**CAUSAL_LM, "architectures": ["Qwen3ForSequenceClassification"]}
    assert read(folder, {"config.json": other}).head == "classifier"


def test_logit_score_of_sentence_transformers(tmp_path):
    files = {
        "config.json": CAUSAL_LM,
        "modules.json": modules("Transformer", "LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 3},
    }
    assert read(tmp_path, files).score_tokens == (3, 7)
    files["1_LogitScore/config.json"] = {"true_token_id": 7, "false_token_id": None}
    assert read(tmp_path, files).score_tokens == (7,)
    files["modules.json"] = modules("Transformer", "LogitScore", "Dense")
    with pytest.raises(ConfigError, match="must be Transformer, LogitScore"):
        read(tmp_path, files)


@pytest.mark.parametrize("tokens", ["yes", ("a", "b", "c"), (False, True)])
def test_wrong_tokens_of_a_reranker(tokens):
    with pytest.raises(ConfigError, match="give the tokens for no and yes"):
        EngineOptions(classifier_from_token=tokens)


def test_splade(tmp_path):
    files = {
        "modules.json": modules("MLMTransformer", "SpladePooling"),
        "1_SpladePooling/config.json": {
            "pooling_strategy": "sum",
            "activation_function": "log1p_relu",
        },
    }
    checkpoint = read(tmp_path, files)
    assert checkpoint.tasks == ("sparse",)
    assert checkpoint.splade_sum
    assert checkpoint.splade_twice


@pytest.mark.parametrize(
    ("extra", "labels", "activation"),
    [
        ({"id2label": {"0": "x"}}, ("x",), "sigmoid"),
        ({"id2label": {"10": "k", "2": "c", "0": "a"}}, ("a", "c", "k"), "softmax"),
        (
            {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
            ("a", "b"),
            "sigmoid",
        ),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, ("a",), "identity"),
        (
            {
                "id2label": {"0": "a"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("a",),
            "identity",
        ),
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
    ],
)
def test_classifiers(tmp_path, extra, labels, activation):
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **extra}
    checkpoint = read(tmp_path, {"config.json": config})
    assert (checkpoint.labels, checkpoint.activation, checkpoint.tasks) == (
        labels,
        activation,
        ("classify",),
    )


def test_bge_m3(tmp_path):
    checkpoint = read(tmp_path, {"sparse_linear.pt": "", "colbert_linear.pt": ""})
    assert checkpoint.tasks == ("embed", "sparse", "token_embed")
    assert (checkpoint.poolings, checkpoint.normalize) == (("cls",), True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"modules.json": modules("Transformer", "Pooling", "LSTM")},
            "modules.json lists Transformer, Pooling, LSTM",
        ),
        ({"modules.json": modules("Transformer", "Normalize", "Pooling")}, "in this order"),
        ({"modules.json": modules("StaticEmbedding")}, "lists StaticEmbedding"),
        (
            {
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode": "new"},
            },
            "the pooling 'new' is not supported",
        ),
        (
            {
                "modules.json": modules("Transformer", "Pooling", "Dense"),
                "2_Dense/config.json": {"activation_function": "mine.Own"},
            },
            "Dense module of a kind that is not supported",
        ),
        ({"config.json": "{"}, "is not valid JSON"),
        ({"config.json": "{}"}, "has no config.json"),
        (
            {
                "config.json": {
                    "architectures": ["BertForSequenceClassification"],
                    "sentence_transformers": {"activation_fn": "torch.nn.Tanh"},
                }
            },
            "the activation Tanh of this classifier",
        ),
    ],
)
def test_unsupported_directories_are_refused(tmp_path, files, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        read(tmp_path, files)


def test_overrides(tmp_path):
    assert read(tmp_path, {}, EngineOptions(pooling="cls")).poolings == ("cls",)
    assert read(tmp_path, {}, EngineOptions(pooling="splade")).tasks == ("sparse",)
    with pytest.raises(ConfigError, match="use one of cls, mean"):
        read(tmp_path, {}, EngineOptions(pooling="middle"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "relative position bias"),
        ({"model_type": "new"}, "transformers has this model as gte"),
        ({"model_type": "nomic_bert", "num_experts": 8}, "it has experts"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "bert", "position_embedding_type": "alibi"}, "ALiBi"),
        (
            {"model_type": "bert", "position_embedding_type": "relative_key"},
            "relative position bias",
        ),
        ({"model_type": "new", "auto_map": {"AutoModel": "m.M"}}, "remote code is not run"),
        ({"model_type": "xlnet"}, "it has not been tested"),
        ({"model_type": "qwen2", "auto_map": {"AutoModel": "m.M"}}, "set `is_causal: false`"),
    ],
)
def test_families_that_are_refused(tmp_path, config, words):
    with pytest.raises(CompatibilityError, match=words):
        check_family(read(tmp_path, {"config.json": config}), DEFAULT)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(is_causal=False), "whether attention is causal cannot be chosen"),
        (EngineOptions(workflow={"attention": "naive"}), "have an attention of their own"),
    ],
)
def test_what_models_by_runs_do_not_take(tmp_path, options, words):
    checkpoint = read(tmp_path, {"config.json": {"model_type": "deberta-v2"}})
    check_family(checkpoint, DEFAULT)
    with pytest.raises(CompatibilityError, match=words):
        check_family(checkpoint, options)


def test_own_code_is_accepted_if_is_causal_is_set(tmp_path):
    config = {"model_type": "qwen2", "auto_map": {"AutoModel": "m.M"}}
    checkpoint = read(tmp_path, {"config.json": config})
    options = EngineOptions(is_causal=False)
    check_family(checkpoint, options)
    assert is_causal(checkpoint, options) is False
    assert is_causal(checkpoint, DEFAULT) is None


def test_a_missing_directory():
    with pytest.raises(ConfigError, match="does not exist"):
        locate("./nowhere")


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        ({"executer": "x:y"}, "unknown key `executer` in `workflow`: did you mean `executor`"),
        ({"scheduler": "x:y"}, "unknown key `scheduler` in `workflow`"),
        (
            {"attention": "sdpa_run"},
            "unknown attention `sdpa_run` in `workflow`: did you mean `sdpa_runs`",
        ),
    ],
)
def test_workflows_that_are_wrong(workflow, words):
    with pytest.raises(ConfigError, match=words):
        check_workflow(workflow)


def test_a_dotted_path():
    assert resolve("executor", "json:dumps") is json.dumps
    with pytest.raises(ConfigError, match="`json:nothing` in `workflow` cannot be loaded"):
        resolve("executor", "json:nothing")


@pytest.mark.parametrize(
    ("mask", "limit", "side", "kept"),
    [
        ([1, 0, 0, 0, 1], 4, "right", [0, 1, 2, 4]),
        ([1, 0, 0, 0, 1], 4, "left", [0, 2, 3, 4]),
        ([1, 0, 0, 0, 1], 2, "right", [0, 4]),
        ([1, 0, 0, 0, 1], 1, "right", [4]),
        ([0, 0, 0, 1], 2, "right", [0, 3]),
        ([0, 0, 0], 2, "left", [1, 2]),
        ([1, 0, 1, 0, 1], 3, "right", [0, 1, 4]),
        ([1, 1, 1], 2, "right", [0, 1]),
    ],
)
def test_truncation(mask, limit, side, kept):
    assert truncated(mask, limit, side) == kept
