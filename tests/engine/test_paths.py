"""The path that GPUs take, and its neighbours, against Hugging Face: see paths.py, which has all of them."""

import subprocess
import sys

import paths
import pytest

pytestmark = pytest.mark.slow

IN_CI = {"V1 async TP1", "V1 sync PP2", "V2 async TP2 Ray actors", "V2 async PP2"}
"""V2 async TP1 has a test of its own below; `python tests/engine/paths.py` runs all."""


@pytest.mark.parametrize("path", [p for p in paths.PATHS if p.name in IN_CI], ids=lambda p: p.name)
def test_tokens_are_those_of_the_reference(path, model_folder, llama):
    report = paths.run(path, model_folder("llama"))
    assert paths.differences(path, report, llama) == []
    assert report["scheduler"] == ("GuidedAsyncScheduler" if path.asynchronous else "GuidedScheduler")
    assert path.v2 or report["stats"]["group_preemptions"] > 0  # V2's texts are too short for that


def test_all_of_them_are_named():
    assert {p.name for p in paths.PATHS} >= IN_CI
    assert len(paths.PATHS) == 32


REQUESTS = "processors_see or bad_words or logprobs or stop_token or end_token or regex or several_samples"
"""Not seeded_batch: right on V2 as well, but minutes long in the interpreter."""


def test_what_a_request_may_ask_for_on_the_path_of_gpus():
    """Much of test_requests.py and test_sampling.py again, in a process whose engines run V2 with async scheduling."""
    (path,) = [p for p in paths.PATHS if p.name == "V2 async TP1"]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", REQUESTS]
    command += ["test_requests.py", "test_sampling.py"]
    done = subprocess.run(command, cwd=paths.HERE, env=paths.environment(path), capture_output=True, timeout=580)
    assert done.returncode == 0, done.stdout.decode()[-6000:]
