"""The path that GPUs take, and its neighbours, against Hugging Face: see paths.py, which has all of
them."""

import subprocess
import sys

import paths
import pytest

pytestmark = pytest.mark.slow

IN_CI = {
    "V1 sync PP2",
    "V2 async TP2 Ray actors",
    "V2 async PP2",
    "V1 async TP1, draft model",
    "V2 async TP1, draft model",
}
"""V2 async TP1 has a test of its own below; `python tests/engine/paths.py` runs all."""


@pytest.mark.parametrize(
    "path", [p for p in paths.PATHS if p.name in IN_CI] + paths.NGRAM[:1], ids=lambda p: p.name
)
def test_tokens_are_those_of_the_reference(path, model_folder, llama):
    report = paths.run(path, model_folder("llama"))
    assert paths.differences(path, report, llama) == []
    assert report["scheduler"] == (
        "GuidedAsyncScheduler" if path.asynchronous else "GuidedScheduler"
    )
    # V2's texts are too short for that, and those with good drafts end too soon
    assert path.v2 or path.drafts or report["stats"]["group_preemptions"] > 0
    if (
        path.v2 and path.drafts
    ):  # the drafter is the target, and guided: always right. V1 loses some of a skipped step
        assert report["stats"]["guided_drafts_accepted"] == report["stats"]["guided_drafts"] > 0


def test_all_of_them_are_named():
    assert {p.name for p in paths.PATHS} >= IN_CI
    assert len(paths.PATHS) == 32


REQUESTS = (
    "test_options",
    "test_structured and (regex or json)",
    "test_sequence_processors and model and not storm and not raises",
    "test_requests and (logprobs or stop_token or regex)",
    "test_sampling and several_samples",
)
"""Not all: minutes long in the interpreter, and right when run by hand."""


def test_what_a_request_may_ask_for_on_the_path_of_gpus():
    """Much of what the other modules ask, again, in a process whose engines run V2 with async
    scheduling."""
    (path,) = [p for p in paths.PATHS if p.name == "V2 async TP1"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        " or ".join(f"({r})" for r in REQUESTS),
    ]
    command += sorted({f"{r.split()[0]}.py" for r in REQUESTS})
    done = subprocess.run(
        command, cwd=paths.HERE, env=paths.environment(path), capture_output=True, timeout=580
    )
    assert done.returncode == 0, done.stdout.decode()[-6000:]
