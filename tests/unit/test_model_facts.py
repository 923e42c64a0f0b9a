"""What a model's config.json says, and what the hub says of a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

from cfg_serve.errors import CommandError
from cfg_serve.generate.model_facts import facts_of, refusals

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "dtype": "bfloat16",
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_positions": 1024,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 128,
}


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "max_len", "kv_token_bytes"),
    [
        (LLAMA, 4096, 2 * 3 * 2 * 64 * 2),
        (LLAMA | {"head_dim": 32}, 4096, 2 * 3 * 2 * 32 * 2),
        (LLAMA | {"dtype": "float32"}, 4096, 2 * 3 * 2 * 64 * 4),
        ({"architectures": ["XForConditionalGeneration"], "text_config": LLAMA}, 4096, 1536),
        (GPT2, 1024, 2 * 2 * 4 * 32 * 4),
        ({}, None, None),
    ],
)
def test_sizes(
    config: dict[str, Any], max_len: int | None, kv_token_bytes: int | None, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    facts = facts_of(folder(tmp_path, config))
    assert (facts.max_len, facts.kv_token_bytes) == (max_len, kv_token_bytes)
    assert facts.weight_bytes == 100
    assert facts.is_local
    assert facts.generates


def test_a_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CommandError, match=r"cannot be read: .* Download the model again"):
        facts_of(str(tmp_path))


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.test"))


@pytest.mark.parametrize(
    ("error", "words", "is_refusal"),
    [
        (errors.GatedRepoError, "org/m is gated: accept its terms", True),
        (errors.RepositoryNotFoundError, "the hub has no such public model", True),
        (errors.EntryNotFoundError, "the hub did not give its config.json", False),
        (OSError, "the hub did not give its config.json (OSError)", False),
    ],
)
def test_what_the_hub_says(
    error: type[Exception], words: str, is_refusal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(model: str, file: str) -> str:
        if error is OSError:
            raise OSError("no network")
        raise error("no", response=response(404))  # type: ignore[call-arg]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(CommandError) as raised:
        facts_of("org/m")
    assert words in str(raised.value)
    assert bool(refusals(["org/m", "s3://bucket/m"])) == is_refusal
