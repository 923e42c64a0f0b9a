"""`cfg-serve check`: what it says of broken files. Values that Ray reads: tests/contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cfg_serve.check.command import problems as told
from cfg_serve.check.file import problems
from cfg_serve.check.yaml_text import parse
from cfg_serve.errors import CommandError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
HEAD = "applications:\n- name: cfg\n  import_path: deployments.app:build\n"
ARGS = HEAD + "  args:\n    model: models/stories\n"
PARTS = ARGS + "  deployments:\n"
REPLICA = PARTS + "  - name: ModelReplica\n"

UNREADABLE = [
    # the text of the file, how the sentence goes on behind the file's name
    ("", " is empty: it needs `applications:`."),
    ("# nothing\n", " is empty: it needs `applications:`."),
    ("- a\n", " holds a list, and not keys such as `applications:`."),
    ("just words\n", " holds a text, and not keys such as `applications:`."),
    ("7\n", " holds a value, and not keys such as `applications:`."),
    (
        "a: 1\nb: [1, 2\nc: 3\n",
        ":3: while parsing a flow sequence expected ',' or ']', but got ':'.\n    c: 3",
    ),
    (
        "applications:\n\t- name: cfg\n",
        ":2: while scanning for the next token found character '\\t' that cannot start any"
        " token. Indent with spaces.\n    - name: cfg",
    ),
    (
        'a: "never closed\n',
        ':1: while scanning a quoted scalar found unexpected end of stream.\n    a: "never closed',
    ),
    (
        ARGS + "   kv_split: even\n",
        ":6: while parsing a block mapping expected <block end>, but found '<block mapping"
        " start>'.\n    kv_split: even",
    ),
    ("a: 1\na: 2\n", ":2: the key `a` stands here a second time.\n    a: 2"),
    ("a: 2026-13-01\n", ":1: month must be in 1..12.\n    a: 2026-13-01"),
    ("a: !!int foo\n", ":1: invalid literal for int() with base 10: 'foo'.\n    a: !!int foo"),
    ("? [a]\n: 1\n", ":1: while constructing a mapping found unhashable key.\n    ? [a]"),
    ("a: *none\n", ":1: found undefined alias 'none'.\n    a: *none"),
    ("a: 1\n---\nb: 1\n", ":2: expected a single document in the stream but found another"),
    ("a: !!set 5\n", ":1: expected a mapping node, but found scalar"),
    ("a: 1\nb: \x07\n", ":2: special characters are not allowed, #x0007."),
    ("[" * 3000, " is nested too deeply."),
    ("a: !!python/object:os.system {}\n", ":1: could not determine a constructor"),
]

BROKEN = [
    # the text of the file, the beginning of each sentence behind its name, with the line
    (
        "application: []\n",
        [
            "1: unknown key `application` in the file: did you mean `applications`?",
            " `applications` must be a list with one entry",
        ],
    ),
    ("applications: []\n", ["1: `applications` must be a list with one entry"]),
    ("applications: {name: cfg}\n", ["1: `applications` must be a list with one entry"]),
    ("applications: [cfg]\n", ["1: `applications[0]` must have keys such as `name`"]),
    ("import_path: deployments.app:build\n", ["1: `import_path` belongs to an entry of"]),
    (
        "http_option: {port: 1}\n" + ARGS,
        ["1: unknown key `http_option` in the file: did you mean `http_options`?"],
    ),
    (
        "http_options: {prot: 8000}\n" + ARGS,
        ["1: unknown key `prot` in `http_options`: did you mean `port`?"],
    ),
    (
        "http_options: {port: 80000}\n" + ARGS,
        ["1: `http_options.port` is '80000': give a number from 1 to 65535."],
    ),
    (
        "http_options: {port: eight}\n" + ARGS,
        ["1: `http_options.port` is 'eight': give a number from 1 to 65535."],
    ),
    (
        "http_options: {host: 'http://0.0.0.0'}\n" + ARGS,
        ["1: `http_options.host` is 'http://0.0.0.0': give an address, such as 127.0.0.1."],
    ),
    ("http_options: 8000\n" + ARGS, ["1: `http_options` must have keys, and is '8000'."]),
    (
        "logging_config: {log_levle: INFO}\n" + ARGS,
        ["1: unknown key `log_levle` in `logging_config`: did you mean `log_level`?"],
    ),
    (
        HEAD.replace("name:", "nam:", 1) + "  args: {model: models/stories}\n",
        ["2: unknown key `nam` in `applications[0]`: did you mean `name`?"],
    ),
    (
        "applications:\n- name: cfg\n  args: {model: models/stories}\n",
        ["2: `applications[0]` needs `import_path: deployments.app:build`."],
    ),
    (
        ARGS.replace("app:build", "app:buidl"),
        ["3: `import_path: deployments.app:buidl` leads to nothing: did you mean `deployments.app"],
    ),
    (HEAD, ["2: `args` names nothing to serve: give `model`, `encoders`, or both."]),
    (
        HEAD + "  args: [model]\n",
        [
            "4: `args` must have keys such as `model`.",
        ],
    ),
    (
        HEAD + "  args: {modle: models/stories}\n",
        ["4: unknown key `modle` in `args`: did you mean `model`?"],
    ),
    (
        ARGS + "    kv_split: odd\n",
        ["6: `kv_split` in `args`: Input should be 'elastic' or 'even'."],
    ),
    (ARGS + "    encoders: 1\n", ["6: `encoders` in `args`: this must have entries, a list."]),
    (
        HEAD + "  args:\n    models:\n    - model: org/a\n      engin: {}\n",
        ["7: `models[0]` (org/a): unknown key `engin` in `models`: did you mean `engine`?"],
    ),
    (ARGS + "    encoders:\n    - 1\n", ["7: `encoders.0` in `args`: this must have keys."]),
    (
        ARGS + "    engine: 1\n    limits: 2\n    access: 3\n",
        [
            "6: `engine` in `args`: this must ha",
            "7: `limits` in `args`: this must ha",
            "8: `access` in `args`: this must ha",
        ],
    ),
    (
        ARGS + "    engin: {max_model_len: 512}\n",
        ["6: unknown key `engin` in `args`: did you mean `engine`?"],
    ),
    (
        ARGS + "    engine: {max_modle_len: 512}\n",
        ["6: unknown key `max_modle_len` in `engine`: did you mean `max_model_len`?"],
    ),
    (
        HEAD + "  args: {model: models/strories}\n",
        ["4: model directory `models/strories` does not exist. Did you mean `models/stories`?"],
    ),
    (HEAD + "  args: {model: ./none}\n", ["4: model directory `./none` does not exist."]),
    (
        ARGS + "    access: {max_body_bytes: 1000000000}\n"
        "    limits: {max_body_bytes_at_once: 1000000000, max_body_bytes_per_client: 1000000000}\n",
        ["6: `access.max_body_bytes` needs messages of 3000000000 bytes between replicas"],
    ),
    (PARTS + "  - ModelReplica\n", ["7: `deployments[0]` must have keys such as `name`"]),
    (
        ARGS + "  deployments: {ModelReplica: {}}\n",
        ["6: `deployments` must be a list with entries"],
    ),
    (
        PARTS + "  - num_replicas: 2\n",
        ["7: `deployments[0]` needs a `name`: CfgRouter, ModelRep"],
    ),
    (
        PARTS + "  - name: ModelReplcia\n",
        ["7: `deployments` has no part `ModelReplcia` to set options of: did you mean `ModelRep"],
    ),
    (
        PARTS + "  - name: Embedder\n",
        ["7: `deployments` has no part `Embedder` to set options of: known parts: CfgRouter, Mod"],
    ),
    (
        HEAD + "  args: {encoders: [{model: org/e}]}\n  deployments:\n  - name: ModelReplica\n",
        ["6: `ModelReplica` in `deployments` belongs to `model` in `args`, which is missing."],
    ),
    (
        REPLICA + "  - name: ModelReplica\n",
        ["8: `ModelReplica` stands twice in `deployments`: put its options into one entry."],
    ),
    (
        REPLICA + "    num_replica: 2\n",
        ["8: unknown key `num_replica` in `ModelReplica`: did you mean `num_replicas`?"],
    ),
    (
        REPLICA + "    ray_actor_options: {num_gpu: 1}\n",
        ["8: unknown key `num_gpu` in `ModelReplica.ray_actor_options`: did you mean `num_gpus`?"],
    ),
    (
        REPLICA + "    ray_actor_options: 1\n",
        ["8: `ModelReplica.ray_actor_options` must have keys, and is '1'."],
    ),
    (
        REPLICA + "    autoscaling_config: {min_replica: 1}\n",
        ["8: unknown key `min_replica` in `ModelReplica.autoscaling_config`: did you mean `min_r"],
    ),
    (
        "proxy_locaton: HeadOnly\n" + REPLICA + "    num_replica: 2\n",
        [
            "1: unknown key `proxy_locaton` in the file",
            "9: unknown key `num_replica` in `ModelReplica`",
        ],
    ),
]


@pytest.mark.parametrize(("text", "words"), UNREADABLE, ids=lambda value: repr(value)[:40])
def test_files_that_cannot_be_read(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    (sentence,) = told(path, with_ray=False)
    assert sentence.startswith(f"{path}{words}")


def test_dates_are_read_where_a_library_has_changed_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """lm-format-enforcer does, in each process that imports it."""
    table = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(table, "tag:yaml.org,2002:timestamp", table["tag:yaml.org,2002:str"])
    assert yaml.safe_load("a: 2026-13-01") == {"a": "2026-13-01"}
    test_files_that_cannot_be_read("a: 2026-13-01", ":1: month must be in 1..12.", tmp_path)


@pytest.mark.parametrize(("text", "sentences"), BROKEN, ids=lambda value: repr(value)[-60:])
def test_broken_files(text: str, sentences: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    found = [line.removeprefix(f"{path}:") for line in told(path, with_ray=False)]
    assert [x[: len(y)] for x, y in zip(found, sentences, strict=True)] == sentences, found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_files_are_right(path: Path) -> None:
    assert problems(path) == []


def test_all_parts_that_args_make_may_have_options(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    encoders = "    encoders: [{model: org/e}, {model: org/f, deployment: Second}]\n"
    names = "".join(f"  - name: {x}\n" for x in ("CfgRouter", "ModelReplica", "Embedder", "Second"))
    path.write_text(ARGS + encoders + "  deployments:\n" + names)
    assert problems(path) == []


def test_parts_of_several_models_may_have_options(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    models = "  args:\n    models: [{model: org/a}, {model: org/b, deployment: Second}]\n"
    names = "".join(f"  - name: {x}\n" for x in ("CfgRouter", "ModelReplica", "Second"))
    path.write_text(HEAD + models + "  deployments:\n" + names)
    assert problems(path) == []
    path.write_text(path.read_text() + "  - name: Secnd\n")
    assert [problem.said for problem in problems(path)] == [
        "`deployments` has no part `Secnd` to set options of: did you mean `Second`?"
    ]
    path.write_text(path.read_text().replace("org/b,", "org/b, enigne: {},"))
    assert problems(path)[0].said == (
        "`models[1]` (org/b): unknown key `enigne` in `models`: did you mean `engine`?"
    )


@pytest.mark.parametrize(
    ("scales", "scaling", "sentence"),
    [
        (True, "{min_replicas: 0}", None),
        (False, "{min_replicas: 1}", None),
        (
            True,
            "{min_replicas: 1}",
            "`scales_to_zero` needs `autoscaling_config: {min_replicas: 0}`",
        ),
        (False, "{min_replicas: 0}", "`Second` has `min_replicas: 0`: set `scales_to_zero: true`"),
    ],
)
def test_a_model_sleeps_where_its_deployment_may(
    scales: bool, scaling: str, sentence: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "sleepy.yaml"
    entry = f"{{model: org/b, deployment: Second, scales_to_zero: {str(scales).lower()}}}"
    models = f"  args:\n    models: [{{model: org/a}}, {entry}]\n  deployments:\n"
    path.write_text(f"{HEAD}{models}  - {{name: Second, autoscaling_config: {scaling}}}\n")
    found = problems(path)
    assert [problem.said[: len(str(sentence))] for problem in found] == [sentence] * bool(sentence)


def test_the_application_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("applications:\n- {name: a, import_path: 'my.app:make', args: {x: 1}}\n")
    assert problems(path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cgf.yaml", "cgf.yaml does not exist. Did you mean"),
        ("", "is a folder: name a YAML file."),
        ("latin.yaml", "latin.yaml is not UTF-8 at byte 3: save it as UTF-8."),
    ],
)
def test_files_that_are_none(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text("a: 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    with pytest.raises(CommandError, match=words):
        problems(tmp_path / name)


def test_an_alias_has_the_line_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "alias.yaml"
    path.write_text("http_options: &a {port: 1}\nlogging_config: *a\napplications: &b\n- *b\n")
    assert [line.partition(" ")[0] for line in told(path, with_ray=False)] == [
        f"{path}:2:",
        f"{path}:3:",
    ]


def test_a_merge_of_yaml_is_not_a_second_key() -> None:
    text = "a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, x: 3}\nd: {<<: [*a, *b]}\n"
    assert parse(text, "f")["d"] == {"x": 1, "y": 2}
