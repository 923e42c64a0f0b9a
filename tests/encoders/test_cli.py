"""The command line with real weights: killed and run again, it writes the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cfg_core.prefill_only import Engine
from cfg_core.prefill_only.__main__ import main
from cfg_core.prefill_only.vector_formats import converted

NUM_LINES = 1200


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    lines = [f"{i} apples and {i * i} pears" for i in range(NUM_LINES)]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    return lines


def command(model: str, folder: Path, output: str) -> list[str]:
    options = ["--lines-per-part", "100", "--threads", "1", "--dtype", "float32"]
    return ["embed", model, str(folder / "in.txt"), str(folder / output), *options]


def test_a_kill_in_the_middle(minilm_path, tmp_path, lines):
    assert main(command(minilm_path, tmp_path, "whole.npy")) == 0
    arguments = command(minilm_path, tmp_path, "out.npy")
    child = subprocess.Popen(
        [sys.executable, "-m", "cfg_core.prefill_only", *arguments], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(tmp_path / "out.npy.parts" / "00000003.npy", child)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait(timeout=30)
    assert not (tmp_path / "out.npy").exists(), (
        "it must be killed before its end for this test to mean anything"
    )
    assert main(arguments) == 0
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    vectors = np.load(tmp_path / "out.npy")
    assert vectors.shape == (NUM_LINES, 384)
    with Engine.load(minilm_path, dtype="float32") as engine:
        np.testing.assert_allclose(vectors[::100], engine.embed(lines[::100]), atol=1e-5)


def test_int8(minilm_path, tmp_path, lines, capsys):
    assert main([*command(minilm_path, tmp_path, "out.npy"), "--quantization", "int8"]) == 0
    assert "computes in int8 on cpu" in capsys.readouterr().err
    with Engine.load(minilm_path, quantization="int8") as engine:
        np.testing.assert_allclose(
            np.load(tmp_path / "out.npy")[::100], engine.embed(lines[::100]), atol=2e-3
        )


@pytest.mark.parametrize("numbers", ["int8", "ubinary"])
def test_vectors_of_fewer_bits(minilm_path, tmp_path, lines, numbers):
    (tmp_path / "in.txt").write_text("\n".join(lines[:9]))
    arguments = [*command(minilm_path, tmp_path, "out.npy"), "--embed-dtype", numbers]
    assert main([*arguments, "--int8-range", "0.25"]) == 0
    with Engine.load(minilm_path, dtype="float32") as engine:
        want = converted(engine.embed(lines[:9]), numbers, 0.25)
    found = np.load(tmp_path / "out.npy")
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    different = (found != want).mean()  # rounding differs with the texts beside one
    assert different < 0.02


def wait_for(path: Path, child: subprocess.Popen, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert child.poll() is None, "the child ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_bad_lines(minilm_path, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("good\n\n" + "long " * 300 + "\ngood\n")
    assert main(command(minilm_path, tmp_path, "out.npy")) == 1
    assert "line 2 of" in capsys.readouterr().err
    assert main([*command(minilm_path, tmp_path, "out.npy"), "--on-error", "nan"]) == 0
    assert "2 lines: 2, 3" in capsys.readouterr().err
    assert np.isnan(np.load(tmp_path / "out.npy")).all(1).tolist() == [False, True, True, False]
    assert (
        main(
            [
                *command(minilm_path, tmp_path, "out.npy"),
                "--truncate",
                "--on-error",
                "nan",
                "--restart",
            ]
        )
        == 0
    )
    assert "1 lines: 2" in capsys.readouterr().err


def test_a_wrong_model_gives_one_sentence(tmp_path, lines, capsys):
    assert main(command("./nowhere", tmp_path, "out.npy")) == 1
    assert capsys.readouterr().err == "error: model directory ./nowhere does not exist.\n"
