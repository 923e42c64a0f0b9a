"""The fingerprint by which a replica may go on with a stream of another one."""

import os
import shutil
from types import SimpleNamespace

import pytest

from deployments.generator.moving import model_fingerprint
from deployments.generator.moving.model_fingerprint import fingerprint, of_engine


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"layers": 2}')
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return made


def config(folder, **fields):
    hf = SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": str(folder)})
    known = {"model": str(folder), "tokenizer": str(folder), "hf_config": hf, "dtype": "float32"}
    model = SimpleNamespace(**{**known, "max_model_len": 512, **fields})
    return SimpleNamespace(
        model_config=model, cache_config=SimpleNamespace(cache_dtype=fields.get("cache", "auto"))
    )


def of(folder, options=None, version="0.32.0", **fields):
    return of_engine(config(folder, **fields), version, options or {})


def test_the_same_files_elsewhere_are_the_same_model(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert of(copy) == of(folder)
    os.utime(copy / "config.json", (1, 1))
    assert of(copy, max_model_len=256, max_num_seqs=3) == of(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"served_model_name": "b"},
        {"override_generation_config": {"temperature": 0.5}},
        {"cache": "fp8"},
        {"version": "0.33.0"},
        {"options": {"frontend": {"chat_template": "{{ messages }}"}}},
    ],
)
def test_what_changes_the_text_is_another_model(folder, fields):
    assert of(folder, **fields) != of(folder)


@pytest.mark.parametrize("size", [100, 40_000], ids=["read whole", "sampled"])
def test_other_files_are_another_model(folder, tmp_path, monkeypatch, size):
    monkeypatch.setattr(model_fingerprint, "WHOLE_BYTES", 20_000)
    monkeypatch.setattr(model_fingerprint, "SAMPLE_BYTES", 64)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(size))
    before = of(folder)
    for at in (0, size - 1):
        content = bytearray(size)
        content[at] = 1
        weights.write_bytes(content)
        assert of(folder) != before
    weights.write_bytes(bytes(size))
    assert of(folder) == before
    weights.write_bytes(bytes(size + 1))
    assert of(folder) != before
    weights.rename(folder / "other.safetensors")
    assert of(folder) != before


def test_files_that_options_name_count_by_their_content(folder, tmp_path):
    def adapter(name, content):
        made = tmp_path / name
        made.mkdir()
        (made / "adapter_model.safetensors").write_text(content)
        return {"frontend": {"lora_modules": [{"name": "style", "path": str(made)}]}}

    first, same, other = adapter("a", "x"), adapter("b", "x"), adapter("c", "y")
    assert of(folder, first) == of(folder, same) != of(folder)
    assert of(folder, first) != of(folder, other)


def test_a_model_that_is_not_on_this_machine_counts_by_its_name(folder):
    names = {of(folder, model=name, tokenizer=name) for name in ("no/such", "no/other", "s3://x")}
    assert len(names) == 3


def test_places_are_told_apart(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fingerprint({}, [str(folder), str(empty)]) != fingerprint({}, [str(empty), str(folder)])
