"""The table of what runs on a GPU machine, in order of worth.

A slice is one command with a limit of its own, at most ten minutes. It leaves figures, so that it
need not run again. See run.py.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_S = 600
"""What one command may take on a machine that is lent."""

PYTEST = "-m pytest -p no:benchmark"
"""A machine's own pytest-benchmark warns beside xdist, and our warnings are errors."""

EQUALITY = f"{PYTEST} tests/gpu/test_equality_gpu.py -n 3 --no-loadscope-reorder -rP -k"
"""pytest with xdist: three engines start at once, because each imports vLLM for 20 s."""


@dataclass(frozen=True)
class Slice:
    """One row of the table.

    name: also the name of its files.
    what: what its figures say.
    command: behind the interpreter, from the root of the repository. `{figures}` is the file that
    it may write a JSON object to; pytest needs none, its counts are read from what it prints.
    limit_s: after so many seconds it is ended.
    needs: names of NEEDS in needs.py, without which it cannot run.
    rehearsal: the command with sizes for a CPU; empty: the same command.
    beside: the version of vLLM to run with, if not the one that is installed.
    """

    name: str
    what: str
    command: str
    limit_s: int
    needs: tuple[str, ...] = ("gpu",)
    rehearsal: str = ""
    beside: str = ""


_AT_SIZE = "-m tools.gpu.equality_at_size --out {figures}"
_TINY_AT_SIZE = f"{_AT_SIZE} --vocabulary 4096 --prompt 512 --new-tokens 4 --dtype float32"

SLICES = (
    Slice(
        "tokens-at-size",
        "tokens at a vocabulary of 151,936 and prompts of 32k equal the reference: V2, CUDA graphs,"
        " async",
        _AT_SIZE,
        limit_s=240,
        rehearsal=_TINY_AT_SIZE,
    ),
    Slice(
        "drafts",
        "tokens under speculation: a draft model, n-grams on the GPU and on the host",
        f"{EQUALITY} 'drafts or ngram'",
        limit_s=420,
    ),
    Slice(
        "decode-8b",
        "a step of B guided requests, against B and 2B plain ones, of 8 billion weights",
        "-m benchmarks.engine.decode --model 8b --batches 1 8 32 128 256 --turns 3 --tokens 40"
        " --out {figures}",
        limit_s=420,
        rehearsal="-m benchmarks.engine.decode --model stories --dtype float32 --batches 1 2"
        " --turns 1 --tokens 8 --out {figures}",
    ),
    Slice(
        "profile-128",
        "where a step of 128 guided requests spends more than one of 256 plain ones: kernels, and"
        " gaps of the host",
        "-m tools.gpu.decode_profile --model 8b --batch 128 --out {figures}",
        limit_s=300,
        rehearsal="-m tools.gpu.decode_profile --model stories --dtype float32 --batch 2"
        " --out {figures}",
    ),
    Slice(
        "preemption",
        "tokens when groups are preempted and prompts chunked",
        f"{EQUALITY} 'tight and not v1 and not float32 and not drafts'",
        limit_s=240,
    ),
    Slice("runner-v1", "tokens on vLLM's V1 runner", f"{EQUALITY} 'v1 and not ngram'", limit_s=300),
    Slice("float32", "tokens of float32 engines", f"{EQUALITY} float32", limit_s=300),
    Slice(
        "no-waits",
        "a guided step makes the host wait no more often than a plain one; the blend's kernels",
        f"{PYTEST} tests/gpu/test_waiting.py tests/gpu/test_blend_kernel_gpu.py -n 3 -rP",
        limit_s=240,
    ),
    Slice(
        "encoders",
        "encoders against vLLM's pooling: texts a second, and how close their vectors are",
        "-m tools.gpu.encoders_beside_vllm --out {figures}",
        limit_s=180,
        rehearsal="-m tools.gpu.encoders_beside_vllm --texts 24 --out {figures}",
    ),
    Slice(
        "encoders-exact",
        "encoders of all dtypes against transformers in float32",
        f"{PYTEST} tests/gpu/test_encoders_gpu.py -rP",
        limit_s=120,
    ),
    Slice(
        "http",
        "grammars and tools over HTTP, plain and guided, as `make serve` serves them",
        "-m tools.gpu.http_grammars --out {figures}",
        limit_s=420,
        needs=("gpu", "ray"),
        rehearsal="-m tools.gpu.http_grammars --cpu --out {figures}",
    ),
    Slice(
        "vllm-0.33",
        "the first slice again, on vLLM 0.33",
        _AT_SIZE,
        limit_s=300,
        needs=("gpu", "vllm 0.33"),
        rehearsal=_TINY_AT_SIZE,
        beside="0.33.0",
    ),
    Slice(
        "two-gpus",
        "tokens of tensor parallelism and of a pipeline on two GPUs",
        f"{PYTEST} tests/gpu/test_equality_gpu.py -rP -k two_gpus",
        limit_s=300,
        needs=("two gpus",),
    ),
)
