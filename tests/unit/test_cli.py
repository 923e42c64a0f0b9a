"""The command: its help, its refusals, and what it would serve. No server starts here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import cfg_serve
from cfg_serve import home
from cfg_serve.check.file import problems_of
from cfg_serve.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("serve", "check", "doctor", "embed", "bench", "chat")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "HAPROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def llama(folder: Path, **fields: Any) -> Path:
    """A folder with a config.json, as far as the command reads it."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "dtype": "bfloat16",
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def served(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The configuration that a command would serve."""
    assert main(["serve", *map(str, arguments), "--print-config"]) == 0
    config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert list(problems_of(config)) == []
    return config


@pytest.mark.parametrize("command", [x for x in COMMANDS if x != "embed"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"cfg-serve {command}" in capsys.readouterr().out


def test_the_first_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(re.search(rf"\b{command}\b", told) for command in COMMANDS)
    assert "--install-completion" in told


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cfg-serve {cfg_serve.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["sreve"], 2, "No such command"),
        (["serve", "--prot", "1"], 2, "No such option: --prot"),
        (["serve", "x.yaml", "--port", "0"], 2, "Invalid value for '--port'"),
        (["serve", "x.yaml", "--kv-split", "odd"], 2, "'odd' is not one of"),
        (["serve"], 1, "name a model, a YAML file, or an encoder with --encoder."),
        (["serve", "none.yaml"], 1, "none.yaml does not exist."),
        (["serve", "./none"], 1, "model directory `./none` does not exist."),
        (["serve", "a/b/c"], 1, "a/b/c does not exist: name a YAML file, a folder, or OWNER/NAME."),
        (["serve", "org/none-of-these"], 1, "HF_HUB_OFFLINE is set. Check the name and the"),
        (["check", "none.yaml"], 1, "none.yaml does not exist."),
        (["check"], 2, "Missing argument"),
        (["bench", "--fast"], 2, "No such option: --fast"),
        (["chat", "--url", "http://127.0.0.1:1"], 1, "start one with `cfg-serve serve`"),
    ],
    ids=str,
)
def test_mistakes_are_told_without_a_traceback(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert words in told
    assert "Traceback" not in told


def test_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path)]) == 1
    assert "is a folder without config.json" in capsys.readouterr().err


def test_an_encoder_is_no_generator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = llama(tmp_path / "bert", architectures=["BertModel"])
    assert main(["serve", str(folder)]) == 1
    assert f"serve it as an encoder, with --encoder {folder}." in capsys.readouterr().err
    config = served(capsys, "--encoder", folder)
    (application,) = config["applications"]
    assert application["args"] == {"encoders": [{"model": str(folder), "deployment": "Embedder"}]}
    assert [part["name"] for part in application["deployments"]] == ["CfgRouter", "Embedder"]


def test_options_are_in_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, encoder = llama(tmp_path / "m"), llama(tmp_path / "e")
    config = served(
        capsys,
        *(model, "--port", "8123", "--host", "0.0.0.0", "--replicas", "2", "--name", "mine"),
        *("--encoder", encoder, "--max-model-len", "300", "--kv-split", "even"),
        *("--dtype", "float32"),
    )
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8123}
    (application,) = config["applications"]
    args, parts = application["args"], {x["name"]: x for x in application["deployments"]}
    assert (args["served_model_name"], args["kv_split"]) == ("mine", "even")
    assert (args["engine"]["max_model_len"], args["engine"]["dtype"]) == (300, "float32")
    assert parts["ModelReplica"]["num_replicas"] == 2
    assert args["encoders"] == [{"model": str(encoder), "deployment": "Embedder"}]
    monkeypatch.setenv("PORT", "8200")
    assert served(capsys, model)["http_options"] == {"host": "127.0.0.1", "port": 8200}


def test_options_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("applications:\n- import_path: deployments.app:build\n  args: {model: org/m}\n")
    config = served(capsys, path, "--port", "8123", "--replicas", "2")
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert config["applications"][0]["deployments"] == [{"name": "ModelReplica", "num_replicas": 2}]
    assert main(["serve", str(path), "--max-model-len", "5"]) == 1
    assert "--max-model-len chooses for a model's name." in capsys.readouterr().err
    path.write_text(path.read_text() + "  deployments: [{name: ModelReplcia}]\n")
    assert main(["serve", str(path), "--print-config"]) == 1
    assert "did you mean `ModelReplica`?" in capsys.readouterr().err


def test_a_file_with_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    models = [{"model": "org/a"}, {"model": "org/b", "deployment": "B"}]
    application = {"import_path": "deployments.app:build", "args": {"models": models}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    config = served(capsys, path, "--port", "8123")
    assert config["applications"][0]["args"]["models"] == models
    assert main(["serve", str(path), "--replicas", "2"]) == 1
    assert "has several models. Set `num_replicas` of each" in capsys.readouterr().err
    application["args"] = {"models": models[1:]}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    (served_one,) = served(capsys, path, "--replicas", "2")["applications"]
    assert served_one["deployments"] == [{"name": "B", "num_replicas": 2}]


def test_a_dry_run_looks_at_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cfg_serve.start.server.ray_refusals", lambda config: [])
    monkeypatch.setattr("cfg_serve.start.preflight.ray_cpus", lambda: 2)
    monkeypatch.setattr("cfg_serve.start.preflight.check_port", lambda host, port: None)
    parts = "  deployments: [{name: ModelReplica, num_replicas: 5}]\n"
    engine = "engine: {kv_cache_memory_bytes: 1048576}"
    path = tmp_path / "own.yaml"
    path.write_text(
        "applications:\n- import_path: deployments.app:build\n"
        f"  args: {{model: org/m, {engine}}}\n{parts}"
    )
    assert main(["serve", str(path), "--dry-run"]) == 1
    assert "the replicas ask for 5.1 CPUs, and there are 2" in capsys.readouterr().err
    path.write_text(path.read_text().replace("num_replicas: 5", "num_replicas: 1"))
    assert main(["serve", str(path), "--dry-run"]) == 0
    assert "can be served on http://127.0.0.1:8000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("autoscaling_config: {min_replicas: two}", "min_replicas: Input should be a valid"),
        ("ray_actor_options: {num_cpus: one}", "num_cpus`: Input should be a valid number"),
        ("num_replicas: .inf", '`num_replicas` must be an int or "auto"'),
    ],
)
def test_a_dry_run_tells_what_ray_refuses(part: str, words: str, tmp_path: Path) -> None:
    """In a process of its own, because it imports Ray."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "applications:\n- import_path: deployments.app:build\n"
        f"  args: {{model: org/m}}\n  deployments: [{{name: ModelReplica, {part}}}]\n"
    )
    command = [sys.executable, "-m", "cfg_serve", "serve", str(path), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_check_tells_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(ROOT / "configs" / "stories.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    assert main(["check", "--no-ray", good]) == 0
    assert capsys.readouterr().out == f"{good}: all right\n"
    assert main(["check", "--no-ray", good, str(bad)]) == 1
    told = capsys.readouterr()
    assert told.out == f"{good}: all right\n"
    assert told.err.startswith(f"{bad}:1: while parsing a flow node")


def test_bench_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cfg_serve.bench.checkout", lambda: None)
    assert main(["bench"]) == 1
    assert "clone it, run `make setup`" in capsys.readouterr().err


def test_the_log_is_kept_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(home.LOGS, str(tmp_path / "logs"))
    first = home.new_log()
    assert first.parent == tmp_path / "logs"
    assert first.stat().st_mode & 0o077 == 0
    for at in range(home.KEPT_LOGS + 3):
        (first.parent / f"serve-1999010{at}-000000-1.log").touch()
    newest = home.new_log()
    assert len(list(first.parent.iterdir())) == home.KEPT_LOGS
    assert newest.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv(home.LOGS, str(tmp_path / "file" / "below"))
    assert home.new_log().exists()


def test_serve_settings_are_those_of_the_file() -> None:
    settings = home.serve_settings()
    assert settings["RAY_SERVE_USE_GRPC_BY_DEFAULT"] == "1"
    assert home.checkout() == ROOT


def test_the_package_has_the_names_of_the_library() -> None:
    assert cfg_serve.GuidanceParams is __import__("cfg_core").GuidanceParams
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = cfg_serve.nothing
