"""Checks of command lines that a test cannot run, such as those that serve until Ctrl-C.

What a line names must exist: the target of `make`, the script or the module, their flags, the
files. EXTERNAL has the programs that are not this project's, with the reason why they are not run.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.docs.snippets import ROOT

EXTERNAL = {
    "curl": "is run where a page is about the model that the tests serve",
    "fold": "is a program of the shell",
    "jq": "is a program of the shell",
    "promtool": "comes with Prometheus; tests/serve/stories/test_dashboard.py runs it",
    "podman": "needs a container runtime and an image",
    "kubectl": "needs a Kubernetes cluster",
    "pip": "would change the environment",
    "export": "sets a variable of the shell",
    "set": "sets an option of the shell",
    "umask": "sets an option of the shell",
    "sysctl": "would change the machine",
}
PYTHONS = ("python", "python3", ".venv/bin/python")
ASSIGNMENT = re.compile(r"^\w+=")


def commands_of(text: str) -> list[list[str]]:
    """The commands of a block, each as its words, without variables, comments and redirections."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " "))
    text = re.sub(r"\$\((.*?)\)", r"; \1 ;", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|<>\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();&|\n"):
            found.append([])
        elif found[-1] or not ASSIGNMENT.match(word):
            found[-1].append(word)
    return [words for words in found if words]


def check(words: list[str]) -> None:
    """Raise AssertionError if the command names what does not exist."""
    program, arguments = words[0], _without_redirections(words[1:])
    if program in EXTERNAL:
        return
    assert program in CHECKS, f"{program}: neither checked nor in EXTERNAL"
    CHECKS[program](arguments)
    for word in arguments:
        if re.match(r"(configs|docs|benchmarks|scripts|tests|models)/", word):
            assert (ROOT / word).exists() or _is_placeholder(word), word


def _without_redirections(words: list[str]) -> list[str]:
    return words[: next((i for i, word in enumerate(words) if set(word) <= set("<>")), None)]


def _is_placeholder(word: str) -> bool:
    """Whether the last part is in capitals (OUT.svg, RESULT.json), or set-up or a page makes it."""
    made = ("models/SmolLM2", "models/thinker")
    return Path(word).stem.isupper() or word.startswith(made)


def _make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in arguments if not ASSIGNMENT.match(word)]
    for target in targets:
        assert re.search(rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:", makefile, re.MULTILINE), target
    for word in arguments:
        if word not in targets:
            name = word.partition("=")[0]
            known = makefile + (ROOT / "scripts/setup.py").read_text(encoding="utf-8")
            assert re.search(rf"\b{name}\b", known), name


def _python(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
        return
    package = ROOT / arguments[1].partition(".")[0] if arguments[0] == "-m" else ROOT
    if package.name in ("benchmarks", "examples", "tools"):
        # Found as files: importing some of them sets variables of this process.
        path = ROOT / arguments[1].replace(".", "/")
        source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert source.exists(), source
        is_ours, files = True, list(package.rglob("*.py"))
    elif arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, arguments[1]
        assert spec.origin is not None
        source = Path(spec.origin)
        is_ours = source.is_relative_to(ROOT) and ".venv" not in source.parts
        files = list(source.parent.rglob("*.py")) if source.name.startswith("__") else [source]
    else:
        source = ROOT / arguments[0]
        assert source.exists(), source
        is_ours, files = True, list(source.parent.glob("*.py"))
    if not is_ours:
        return
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert flag in text or _is_of_harness(arguments[1]), f"{source.name} has no {flag}"


def _is_of_harness(module: str) -> bool:
    """Whether the flags are lm-evaluation-harness's own."""
    return module == "cfg_core.harness"


def _click(load: Callable[[], object]) -> Callable[[list[str]], None]:
    def checked(arguments: list[str]) -> None:
        group = load()
        command = group.commands.get(arguments[0])  # type: ignore[attr-defined]
        assert command is not None, arguments[0]
        known = {name for parameter in command.params for name in parameter.opts}
        for word in arguments[1:]:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, word

    return checked


def _ray() -> object:
    from ray.scripts.scripts import cli

    return cli


def _serve() -> object:
    from ray.serve.scripts import cli

    return cli


def _cfg_serve(arguments: list[str]) -> None:
    """The options of `embed` and `bench` belong to other parsers."""
    from typer.main import get_command

    from cfg_serve.cli import app

    if arguments and arguments[0] not in ("embed", "bench") and not arguments[0].startswith("-"):
        _click(lambda: get_command(app))(arguments)


def _source(arguments: list[str]) -> None:
    made_by_setup = arguments[0].startswith(".venv/")
    assert made_by_setup or (ROOT / arguments[0]).exists(), arguments[0]


CHECKS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(PYTHONS, _python),
    "make": _make,
    "ray": _click(_ray),
    "serve": _click(_serve),
    **dict.fromkeys(("cfg-serve", ".venv/bin/cfg-serve"), _cfg_serve),
    ".": _source,
}
"""How the words after each program are checked."""
