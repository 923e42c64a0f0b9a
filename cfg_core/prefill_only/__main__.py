"""The command line, which computes a vector for each line of a file.

    cfg-serve embed MODEL INPUT OUTPUT

INPUT is a .txt file with one text per line, or a .jsonl file with one object per line. OUTPUT is a
.npy or .parquet file. After an interruption, the same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from cfg_core.errors import CfgServeError
from cfg_core.prefill_only.bulk import BulkError, Embed, Job, chunks, read_texts, run
from cfg_core.prefill_only.engine import Engine
from cfg_core.prefill_only.models.checkpoint import locate, read_checkpoint
from cfg_core.prefill_only.models.loading import choose_device, choose_dtype, name_of
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import FloatArray, RequestOptions
from cfg_core.prefill_only.vector_formats import NUMBERS

RECORDED = (
    *("model", "prompt_name", "dimensions", "truncate", "on_error"),
    *("device", "threads"),
)
"""The arguments that affect the vectors, in the order of the manifest."""


def parser(prog: str = "python -m cfg_core.prefill_only") -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=prog, description=__doc__)
    embed = result.add_subparsers(required=True).add_parser(
        "embed", help="compute a vector for each line of a file"
    )
    embed.add_argument("model", help="directory of the model, or a name on the Hugging Face hub")
    embed.add_argument("input", type=Path, help=".txt or .jsonl")
    embed.add_argument("output", type=Path, help=".npy or .parquet")
    embed.add_argument(
        "--field", default="text", help="field of a .jsonl line that holds its text (default: text)"
    )
    embed.add_argument(
        "--prompt-name", help="name of the model's prompt to put in front of each text"
    )
    embed.add_argument(
        "--dimensions", type=int, help="keep the first N dimensions (Matryoshka models)"
    )
    embed.add_argument(
        "--truncate",
        action="store_true",
        help="truncate texts that are too long, instead of failing",
    )
    embed.add_argument(
        "--on-error",
        choices=["stop", "nan"],
        default="stop",
        help="for a text that cannot be computed: stop, or write NaN",
    )
    embed.add_argument(
        "--embed-dtype",
        choices=NUMBERS,
        default="float32",
        help="numbers of the output; those of bytes and bits are of normalised vectors",
    )
    embed.add_argument(
        "--int8-range",
        type=float,
        help="the component that becomes 127 in bytes (default: 6 / sqrt(dimensions))",
    )
    embed.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    embed.add_argument(
        "--quantization", help="int8: compute linear layers in 8 bits, on x86-64 CPUs"
    )
    embed.add_argument(
        "--device",
        default="auto",
        help="device to compute on: cpu, cuda, or one GPU such as cuda:1; auto takes the first GPU"
        " if there is one",
    )
    embed.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads on the CPU"
    )
    embed.add_argument(
        "--lines-per-part",
        type=int,
        default=4096,
        help="lines of the input in one part of the output; a killed process loses at most one"
        " part (default: 4096)",
    )
    embed.add_argument(
        "--restart", action="store_true", help="delete earlier output and start from the first line"
    )
    return result


def main(arguments: list[str] | None = None, prog: str = "python -m cfg_core.prefill_only") -> int:
    """Returns the exit status. prog: what the user typed, for the usage."""
    args = parser(prog).parse_args(arguments)
    try:
        return embed_file(args)
    except CfgServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue.", file=sys.stderr)
        return 130


def embed_file(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    engine_options = EngineOptions(
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        num_threads=args.threads,
        int8_range=args.int8_range,
    )
    device = choose_device(engine_options)
    # Not `auto`: vectors that another machine computed in another type do not belong to this job.
    model_type = read_checkpoint(locate(args.model), engine_options).model_type
    dtype = args.quantization or name_of(choose_dtype(engine_options, device, model_type))
    job = Job(
        input=args.input,
        output=args.output,
        text_field=args.field,
        lines_per_part=args.lines_per_part,
        settings={name: getattr(args, name) for name in RECORDED} | {"dtype": dtype},
        numbers=args.embed_dtype,
        int8_range=args.int8_range,
    )
    job.check()
    with Engine(args.model, engine_options) as engine:
        print(f"{args.model} computes in {dtype} on {device}.", file=sys.stderr)
        options = engine.options(
            "embed",
            prompt_name=args.prompt_name,
            dimensions=args.dimensions,
            truncate=args.truncate,
        )
        num_lines = check_texts(job, engine, options, stop=args.on_error == "stop")
        with tqdm(total=num_lines, unit="text", disable=None) as bar:
            missing = run(
                job,
                embedder(engine, options),
                args.dimensions or engine.info.dimension or 0,
                restart=args.restart,
                progress=bar.update,
            )
    print(f"{args.output}: {num_lines - len(missing)} vectors for {num_lines} lines.")
    if missing:
        shown = ", ".join(map(str, missing[:20])) + (" ..." if len(missing) > 20 else "")
        print(f"no vector (NaN) for {len(missing)} lines: {shown}", file=sys.stderr)
    return 0


def check_texts(job: Job, engine: Engine, options: RequestOptions, *, stop: bool) -> int:
    """The number of texts.

    stop: raise BulkError for the first bad text. All texts are checked before any is computed, so
    that the error does not come after hours.
    """
    num_lines = 0
    for texts in chunks(read_texts(job), job.lines_per_part):
        for number, problem in enumerate(
            engine.problems(texts, options) if stop else (), num_lines + 1
        ):
            if problem is not None:
                raise BulkError(
                    f"line {number} of {job.input}: {problem} Or write NaN for such lines with"
                    " --on-error nan."
                )
        num_lines += len(texts)
    return num_lines


def embedder(engine: Engine, options: RequestOptions) -> Embed:
    """A function that computes vectors of texts.

    The vector of a text is NaN if the text is refused or if it fails in the model.
    """

    def embed(texts: list[str]) -> FloatArray:
        width = options.dimensions or engine.info.dimension or 0
        vectors = np.full((len(texts), width), np.nan, dtype=np.float32)
        good = [i for i, problem in enumerate(engine.problems(texts, options)) if problem is None]
        outputs = engine.run_each([texts[i] for i in good], options, show_progress=False)
        for i, output in zip(good, outputs, strict=True):
            if not isinstance(output, CfgServeError):
                vectors[i] = output.array("embed")
        return vectors

    return embed  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
