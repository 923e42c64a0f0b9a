"""The path that vLLM takes on GPUs, and similar ones, against Hugging Face.

paths.py lists all paths. CI plays some of them, and `make survey` the others.
"""

import re
import subprocess
import sys

import pytest

from tests.engine import paths
from tests.engine.chosen import chosen

pytestmark = pytest.mark.slow

IN_CI = {
    "V1 sync PP2",
    "V2 async TP1, draft model",
    "V1 sync TP1, ngram",
    "V1 sync TP1, suffix",
}
"""V2 async TP1 has a test of its own below. Several ranks on V2: test_ranks.py. TP2, on Ray's
actors: tests/serve/tensor_parallel. A draft model on V1: test_speculation.py.
"""

ROWS = chosen(
    [path for path in [*paths.PATHS, *paths.LOOKUPS] if not path.missing],
    IN_CI,
    name=lambda path: path.name,
)


@pytest.mark.parametrize("path", ROWS)
def test_tokens_are_those_of_the_reference(path, model_folder, llama):
    report = paths.run(path, model_folder("llama"), llama)
    assert paths.differences(path, report, llama) == []
    assert report["scheduler"] == (
        "GuidedAsyncScheduler" if path.asynchronous else "GuidedScheduler"
    )
    # on V2 and with drafts, texts end before groups are preempted
    assert path.v2 or path.drafts or report["stats"]["group_preemptions"] > 0
    if path.drafter == "suffix":
        assert report["stats"]["guided_drafts_accepted"] > 0
    # A draft model is the target model, and guided, so V2 accepts all drafts. V1 loses those of a
    # step that it skips.
    if path.v2 and path.drafts and path.drafter == "draft_model":
        assert report["stats"]["guided_drafts_accepted"] == report["stats"]["guided_drafts"] > 0


@pytest.mark.parametrize(
    ("places", "left_out", "least"),
    [
        pytest.param(
            ("tests/engine/test_formulas.py", "tests/engine/test_options.py"),
            ("slow_on_v2", "survey_on_v2"),
            20,
            id="formulas and options",
        ),
        # minutes, interpreted
        pytest.param(("tests/engine",), ("slow_on_v2",), 60, id="all", marks=pytest.mark.survey),
    ],
)
def test_request_options_on_the_path_of_gpus(places, left_out, least):
    """Run the tests that are marked v2 again, in a process whose engines use V2 with async
    scheduling."""
    (path,) = [p for p in paths.PATHS if p.name == "V2 async TP1"]
    marked = ("-m", " and not ".join(("v2", *left_out)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *marked, *places],
        cwd=paths.ROOT,
        env=paths.environment(path),
        capture_output=True,
        timeout=580,
    )
    report = done.stdout.decode()
    assert done.returncode == 0, report[-6000:]
    assert int(re.findall(r"(\d+) passed", report)[-1]) >= least
