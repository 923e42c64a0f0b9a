"""tools/gpu: its table, and how slices are run, ended, skipped and told; without a GPU."""

import json
import shlex
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tools.gpu import gpu_pack, needs, slice_runner, slices

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make():
    """A slice whose command is a line of Python."""

    def made(name, code, limit_s=30, **more):
        command = f"-c {shlex.quote(code)} {{figures}}"
        return slices.Slice(name, "a test", command, limit_s, needs=(), **more)

    return made


@pytest.fixture
def start(tmp_path):
    def made(missing=lambda need: None, rehearse=False):
        return slice_runner.Runner(tmp_path / "out", missing, lambda one: {}, rehearse)

    return made


WRITE = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"n\": 3}')"


def test_the_table_is_sound():
    names = [one.name for one in slices.SLICES]
    assert len(set(names)) == len(names)
    for one in slices.SLICES:
        assert 0 < one.limit_s <= slices.MOST_S
        assert set(one.needs) <= set(needs.NEEDS)
        for command in filter(None, (one.command, one.rehearsal)):
            words = shlex.split(command)
            paths = [word for word in words if "/" in word and not word.startswith("{")]
            assert words[0] == "-m", command
            module = ROOT / f"{words[1].replace('.', '/')}.py"
            assert words[1] == "pytest" or module.is_file(), command
            assert all((ROOT / path).exists() for path in paths), command
            assert "{figures}" in command or words[:2] == ["-m", "pytest"], command


def test_the_tests_that_the_table_chooses_exist():
    text = (ROOT / "tests" / "gpu" / "test_equality_gpu.py").read_text()
    chosen = {word for one in slices.SLICES if "-k" in one.command for word in words_of(one)}
    assert chosen
    assert all(word in text for word in chosen), chosen


def words_of(one):
    expression = shlex.split(one.command)[-1]
    return [word for word in expression.split() if word not in ("and", "or", "not")]


def test_a_slice_leaves_its_figures_and_its_text(make, start, tmp_path):
    one = make("one", f"{WRITE}; print('told')")
    (result,) = start().run([one], 60)
    assert (result.status, result.figures) == (slice_runner.DONE, {"n": 3})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one.json", "one.txt"]
    assert (tmp_path / "out" / "one.txt").read_text() == "told\n"
    assert json.loads((tmp_path / "out" / "one.json").read_text())["figures"] == {"n": 3}


def test_what_has_figures_is_not_run_again(make, start):
    first, second = make("first", WRITE), make("second", WRITE)
    assert [made.name for made in start().run([first], 60)] == ["first"]
    assert [made.name for made in start().run([first, second], 60)] == ["second"]
    assert start().run([first, second], 60) == []
    assert [made.name for made in start().run([first], 60, again=True)] == ["first"]


def test_a_slice_that_fails_does_not_stop_the_others(make, start, tmp_path):
    bad = make("bad", f"{WRITE}; raise ValueError('broken')")
    results = start().run([bad, make("good", WRITE)], 60)
    assert [made.status for made in results] == [slice_runner.FAILED, slice_runner.DONE]
    assert results[0].figures == {"n": 3}
    assert "broken" in (tmp_path / "out" / "bad.txt").read_text()
    assert start().run([bad], 60) == []  # it would fail again


def test_a_slice_is_ended_at_its_limit_with_all_that_it_started(make, start, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    (result,) = start().run([make("slow", code, limit_s=2)], 60)
    assert result.status == slice_runner.LATE
    assert 2 <= result.seconds < 30
    child = (tmp_path / "out" / "slow.txt").read_text().strip()
    wait_until_dead(Path(f"/proc/{child}/stat"))


def wait_until_dead(state, limit_s=20):
    end = time.monotonic() + limit_s
    while state.exists() and ") Z " not in state.read_text():  # nobody may have reaped it yet
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_slice_starts_only_if_half_of_its_limit_is_left(make, start):
    long, short = make("long", WRITE, limit_s=300), make("short", WRITE, limit_s=20)
    assert [made.name for made in start().run([long, short], 100)] == ["short"]
    (result,) = start().run([long], 200)
    assert result.limit_s <= 200


def test_what_a_machine_lacks_is_told(make, start):
    one = replace(make("two", WRITE), needs=("two gpus",))
    (result,) = start(lambda need: f"there is no {need}").run([one], 60)
    assert (result.status, result.why) == (slice_runner.CANNOT, "there is no two gpus")
    assert start().result(one) == result


def test_a_rehearsal_has_a_command_of_its_own(make, start):
    one = make("one", "raise SystemExit(1)", rehearsal="-c pass")
    (result,) = start(rehearse=True).run([one], 60)
    assert (result.status, result.rehearsal, result.command) == ("done", True, "-c pass")


def test_counts_of_pytest_are_figures(make, start):
    told = "print('1 failed in an earlier line')\nprint('sync: worst 0.4, preempted 3')\n"
    passed = make("passed", f"{told}print('== 12 passed in 3s ==')")
    skipped = make("skipped", "print('13 skipped in 0.05s')")
    results = start().run([passed, skipped], 60)
    figures = {"passed": 12, "worst": {"sync": "0.4, preempted 3"}}
    assert [made.figures for made in results] == [figures, {"skipped": 13}]
    assert [made.status for made in results] == [slice_runner.DONE, slice_runner.CANNOT]


def test_the_table_of_results(make, start):
    code = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"headline": "fine"}\')'
    chosen = [make("one", code), make("two", WRITE), make("three", WRITE)]
    runner = start()
    runner.run(chosen[:2], 60)
    lines = slice_runner.table([runner.result(one) for one in chosen], chosen).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["one", "two", "three"]
    assert "fine" in lines[2]
    assert "n 3" in lines[3]
    assert "not run yet" in lines[4]


def test_the_command_line(tmp_path):
    command = [sys.executable, "-m", "tools.gpu.run"]

    def run(*options):
        # without a PATH there is no nvidia-smi, so no GPU
        return subprocess.run(
            [*command, *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": ""},
        )

    told = run("list", "--out", str(tmp_path))
    assert "| tokens-at-size | 240 | gpu | to run |" in told.stdout
    options = ["--only", "two-gpus", "--out", str(tmp_path), "--bundle", str(tmp_path / "back")]
    done = run("run", "--rehearse", *options)
    assert "two-gpus: cannot run here" in done.stdout
    with tarfile.open(tmp_path / "back" / "figures.tar.gz") as archive:
        assert f"{tmp_path.name}/two-gpus.json" in archive.getnames()
    assert "| two-gpus | cannot run here |" in (tmp_path / "back" / "summary.txt").read_text()


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_everything_that_is_packed_is_pinned(version):
    names = gpu_pack.requirements(gpu_pack.WHEELS.read_text(), gpu_pack.pins(version))
    assert f"vllm=={version}.0" in names
    assert len(set(names)) == len(names) > 100


def test_a_folder_travels_in_parts(tmp_path):
    site, back = tmp_path / "site", tmp_path / "back"
    kept, left = site / "vllm" / "kernel.so", site / "torch" / "include" / "c10.h"
    for path in (kept, left):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(range(256)) * 40)
    archive = tmp_path / gpu_pack.ARCHIVE.format(version="0.32")
    gpu_pack.archived(site, archive)
    parts = gpu_pack.cut(archive, 100)
    assert len(parts) > 1
    assert all(part.stat().st_size <= 100 for part in parts)
    back.mkdir()
    gpu_pack.unpack(parts, back)
    assert (back / "vllm" / "kernel.so").read_bytes() == kept.read_bytes()
    assert not (back / "torch").exists()
    calls = list(gpu_pack.calls([part.relative_to(tmp_path) for part in parts], "0.32"))
    assert len(calls) == len(parts) + 2
    assert all(len(call) < 2000 for call in calls)
    with pytest.raises(ValueError, match="leave files out of it"):
        gpu_pack.cut(archive, 0)
