"""Ray Data: the engine is in an actor of Ray's, which is patched for what its arguments say.

Its cluster and its actors take minutes to start. What travels with the arguments is shown without
Ray in tests/contract/test_ray_llm.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.oracle import FOLDER
from tools.serving.process import REPOSITORY, STOCK

pytestmark = [pytest.mark.slow, pytest.mark.survey, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="guided_engine_args"),
        pytest.param(["--by-hand"], id="by-hand"),
    ],
)
def test_200_rows_are_those_of_an_offline_engine(flags: list[str]) -> None:
    # Ray Data needs pandas, which is only with the packages that tests compare with.
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")]), FOLDER]
    env = {**os.environ, **STOCK, "PYTHONPATH": os.pathsep.join(paths)}
    program = [sys.executable, "-m", "tests.serve.ray_llm.data_program", *flags]
    done = subprocess.run(
        program, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["ray"]) == 200
    assert told["ray"] == told["llm"]
    scaled = {(prompt, text) for prompt, _, text in told["ray"]}
    assert len(scaled) > 100, "the scales make no difference"
