"""Why a start failed: the first error of the engine's process, and what to do."""

from __future__ import annotations

import pytest

from cfg_serve.start.causes import FAILED, cause, lacking, last_lines

ENGINE = "\x1b[36m(ModelReplica pid=7)\x1b[0m \x1b[0;36m(EngineCore pid=9)\x1b[0;0m "
TRACEBACK = (
    "ERROR 11-26 10:00:00 [core.py:1100] Traceback (most recent call last):\n"
    '{engine}ERROR 11-26 10:00:00 [core.py:1100]   File "/x/core.py", line 1, in run\n'
    "{engine}ERROR 11-26 10:00:00 [core.py:1100] {error}\n"
    '(ServeController pid=3)   File "/x/y.py", line 2\n'
    "(ServeController pid=3) RuntimeError: Engine core initialization failed. See root cause above."
)

CASES = [
    # the last line of the engine's traceback, words of the advice
    (
        "ValueError: Available memory on node 0 (15.01/21.46 GiB) on startup is less than desired"
        " CPU memory utilization (0.92, 19.75 GiB). On the CPU backend, the flag",
        "`engine: {kv_cache_memory_bytes: 2013265920}`: 15.01 GiB of memory are free, and without"
        " it vLLM takes 19.75 GiB.",
    ),
    (
        "ValueError: Free memory on device cuda:0 (40.0/80.0 GiB) on startup is less than desired"
        " GPU memory utilization (0.92, 73.6 GiB).",
        "`engine: {gpu_memory_utilization: 0.45}`",
    ),
    ("ValueError: current platform cpu does not support ray.", "distributed_executor_backend: mp"),
    (
        "ValueError: To serve at least one request with the model's max seq len (8192), (1.0 GiB KV"
        " cache is needed, which is larger than the available KV cache memory (0.5 GiB).",
        "set a smaller `max_model_len`",
    ),
    ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", "set HF_TOKEN"),
    (
        "OSError: You are trying to access a gated repo.",
        "accept the model's terms",
    ),
    (
        "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.",
        "check the name of the model",
    ),
    (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find a cached snapshot",
        "drop `HF_HUB_OFFLINE`",
    ),
    ("OSError: [Errno 98] Address already in use", "another one (--port)"),
    ("ValueError: Unknown dtype: float7", "set `engine: {dtype: auto}`"),
    (
        "ValueError: Loading this repo requires `trust_remote_code=True`.",
        "`engine: {trust_remote_code: true}`",
    ),
    ("ValueError: Model architectures ['X'] are not supported for now.", "docs/models.md"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "a smaller model"),
    ("RuntimeError: No CUDA GPUs are available", "its CPU build"),
    ("ModuleNotFoundError: No module named 'soundfile'", "install the package of that module"),
    (
        "Exception: The current node timed out during startup. This could happen because some of"
        " the raylet failed to startup or the GCS has become overloaded.",
        "too busy to start Ray",
    ),
    (
        "ValueError: total number of attention heads (9) must be divisible by tensor parallel size"
        " (2).",
        "`tensor_parallel_size` that divides",
    ),
]


@pytest.mark.parametrize(("error", "advice"), CASES, ids=lambda text: text[:40])
def test_the_first_error_and_what_to_do(error: str, advice: str) -> None:
    found = cause("noise\n" + ENGINE + TRACEBACK.format(engine=ENGINE, error=error))
    assert found is not None
    assert found.error == error
    assert advice in found.advice
    assert str(found).startswith(f"{error}\n\nWhat to do: ")


def test_lines_of_other_processes_are_left_out() -> None:
    """Ray mixes the lines of all processes."""
    lines = [
        ENGINE + "ValueError: Unknown dtype: float7",
        "(ServeController pid=3) INFO 2026-11-26 10:42:29,6 controller 3 -- a remark",
        ENGINE + "Use another one.",
        "\x1b[36m(ModelReplica pid=7)\x1b[0m [W1126 10:42 utils.cpp:68] Warning: NUMA",
    ]
    found = cause("\n".join(lines))
    assert found is not None
    assert found.error == "ValueError: Unknown dtype: float7\nUse another one."


def test_an_unknown_error_is_told_without_advice() -> None:
    found = cause("a\nTraceback (most recent call last):\n  File x\nKeyError: 'lm_head'\nmore")
    assert found is not None
    assert (found.error, found.advice) == ("KeyError: 'lm_head'\nmore", "")


def test_an_error_with_advice_goes_before_an_earlier_one() -> None:
    found = cause("Traceback\nKeyError: 'harmless'\n\nTraceback\nValueError: Unknown dtype: float7")
    assert found is not None
    assert found.error == "ValueError: Unknown dtype: float7"


def test_the_symptoms_of_other_processes_are_no_cause() -> None:
    log = "(x pid=1) ray.exceptions.RayTaskError(ValueError): y\nRuntimeError: Engine core died"
    assert cause(log) is None


def test_the_deployment_that_failed_is_known() -> None:
    told = "(ServeReplica:cfg:Second pid=7) (EngineCore pid=9) ValueError: Unknown dtype: float7"
    found = cause(f"(ServeReplica:cfg:First pid=3) loading\n{told}")
    assert found is not None
    assert found.deployment == "Second"
    other = cause("(raylet) Error: No available node types can fulfill resource request {'GPU': 4}")
    assert other is not None
    assert other.deployment == ""


def test_a_line_without_a_traceback() -> None:
    line = "(raylet) Error: No available node types can fulfill resource request {'GPU': 4.0}"
    found = cause(f"starting\n{line}\n")
    assert found is not None
    assert "lower `num_replicas`" in found.advice
    assert lacking(f"{line}\n{line.replace('4.0', '5.0')}\n") == "{'GPU': 5.0}"
    assert lacking("all is well") is None


def test_a_log_without_an_error() -> None:
    assert cause("INFO all is well\nloading weights took 3.1 seconds") is None


def test_lines_are_shown_without_names_and_colours() -> None:
    assert last_lines("\n".join(["a", ENGINE + "b"]), 1) == "b"


@pytest.mark.parametrize(
    "line",
    [
        "Deploying application 'cfg' failed with status DEPLOY_FAILED",
        "INFO (x pid=1) Exception in Replica(id='a', app='cfg'), the replica will be stopped.",
        '(ServeController pid=7)   File "/x/application_state.py", line 1002,'
        " in _reconcile_build_app_task",
    ],
)
def test_lines_that_end_the_start(line: str) -> None:
    """The last one: the YAML has options of a deployment that this application does not have."""
    assert FAILED.search(f"before\n{line}\nafter")
    assert not FAILED.search("Imported and built app 'cfg' successfully.")
