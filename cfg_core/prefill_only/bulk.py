"""Computes a file of vectors from a file of texts, and can be resumed at any point.

If the process is killed at any moment, the same command continues where it stopped.

    OUTPUT.parts/manifest.json   what is computed: fingerprint of the input, the model, the options
    OUTPUT.parts/00000000.npy    vectors of the first `lines_per_part` lines; then 00000001.npy ...
    OUTPUT                       assembled from the parts when all are there

Each file is written under a temporary name, flushed to the disk, and renamed: it is either complete
or absent. Parts are cut by line number alone, so a run with interruptions writes the same bytes as
one without.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cfg_core.errors import CfgServeError
from cfg_core.prefill_only.stages.outputs import normalized
from cfg_core.prefill_only.types import FloatArray
from cfg_core.prefill_only.vector_files import write_npy, write_parquet
from cfg_core.prefill_only.vector_formats import BITS, BYTES, Number, check_bits, converted

FORMATS = (".npy", ".parquet")
ONLY_OUTPUT = ("output", "numbers", "int8_range")
"""Fields of a job that its parts do not depend on."""

Embed = Callable[[Sequence[str]], FloatArray]
"""Texts -> float32 [n, d], NaN in the rows of texts that have no vector."""


class BulkError(CfgServeError):
    """The job cannot start or cannot continue. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is computed.

    What affects the parts is compared when a job is resumed: all but ONLY_OUTPUT.
    """

    input: Path
    """A .txt file with one text per line, or a .jsonl file with one object per line."""
    output: Path
    """A .npy file ([lines, dimensions]) or a .parquet file.

    The columns of a .parquet file are index, id (if the first line has one) and embedding. Its rows
    are in the order of the lines.
    """
    text_field: str = "text"
    """The field of a .jsonl line that holds its text."""
    lines_per_part: int = 4096
    settings: dict[str, Any] = field(default_factory=dict)
    """The model and its options, as they are recorded in the manifest."""
    numbers: Number = "float32"
    """Of the output. Parts are float32. Of bits, eight are one number."""
    int8_range: float | None = None
    """The component that becomes 127: see vector_formats.py, also for the default."""

    @property
    def parts(self) -> Path:
        return self.output.with_name(self.output.name + ".parts")

    def check(self) -> None:
        """Raise BulkError if a path is wrong, or if pyarrow is needed and not installed."""
        if self.input.suffix not in (".txt", ".jsonl"):
            raise BulkError(f"{self.input} must be a .txt or .jsonl file.")
        if not self.input.is_file():
            raise BulkError(f"{self.input} does not exist.")
        if self.output.suffix not in FORMATS:
            raise BulkError(f"{self.output} must end in .npy or .parquet.")
        if not self.output.parent.is_dir():
            raise BulkError(f"{self.output.parent} does not exist: make that directory first.")
        if self.output.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
            raise BulkError("a .parquet output needs pyarrow: pip install pyarrow, or write .npy.")


# ---- reading -------------------------------------------------------------------------------------


def read_texts(job: Job) -> Iterator[str]:
    """The texts, in order. An empty line of a .txt file is an empty text.

    Raises BulkError, with the line number, for bad JSON or a line without the text field.
    """
    for number, line in enumerate(_lines(job.input), 1):
        yield line if job.input.suffix == ".txt" else _object(job, line, number)[job.text_field]


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        try:
            for line in file:
                yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise BulkError(f"{path} is not UTF-8 text: {error}.") from None


def _object(job: Job, line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BulkError(f"line {number} of {job.input} is not valid JSON: {error}.") from None
    if not isinstance(value, dict) or not isinstance(value.get(job.text_field), str):
        raise BulkError(
            f"line {number} of {job.input} has no text in {job.text_field!r}: name the right field"
            " with --field."
        )
    return value


def _fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunks(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while chunk := list(islice(texts, size)):
        yield chunk


# ---- the job -------------------------------------------------------------------------------------


def run(
    job: Job,
    embed: Embed,
    dimension: int,
    *,
    restart: bool = False,
    progress: Callable[[int], None],
) -> list[int]:
    """Compute the missing parts and assemble the output.

    restart: first remove an output and parts that exist.

    progress: called with the number of lines of each part when the part is complete.

    Returns the numbers (from 1) of the lines without a vector. Raises BulkError if the input is
    empty, if the output exists, if another process works on it, or if the parts belong to another
    job; RequestError if bits of vectors of this dimension do not fill bytes.
    """
    job.check()
    if job.numbers in BITS:
        check_bits(dimension)
    with _locked(job):
        _prepare(job, restart)
        num_lines = 0
        for number, texts in enumerate(chunks(read_texts(job), job.lines_per_part)):
            part = job.parts / f"{number:08d}.npy"
            if not part.exists():
                _write(part, partial(_save, _vectors(embed, texts, dimension)))
            num_lines += len(texts)
            progress(len(texts))
        if not num_lines:
            raise BulkError(f"{job.input} is empty.")
        missing = _assemble(job, num_lines)
        shutil.rmtree(job.parts)
        return missing


def _save(vectors: FloatArray, file: IO[bytes]) -> None:
    np.save(file, vectors)


def _vectors(embed: Embed, texts: Sequence[str], dimension: int) -> FloatArray:
    vectors = np.ascontiguousarray(embed(texts), dtype=np.float32)
    assert vectors.shape == (len(texts), dimension)
    return vectors


@contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Let only one process work on an output.

    The system releases the lock when the process ends, for whatever reason.
    """
    path = job.output.with_name(job.output.name + ".lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BulkError(
                f"another process is writing {job.output}: wait for it, or name another output."
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _prepare(job: Job, restart: bool) -> None:
    """Make the folder of parts, or check that an existing one belongs to this job."""
    manifest = {
        **{
            name: str(value)
            for name, value in asdict(job).items()
            if name not in (*ONLY_OUTPUT, "settings")
        },
        "settings": job.settings,
        "sha256": _fingerprint(job.input),
    }
    if restart:
        shutil.rmtree(job.parts, ignore_errors=True)
        job.output.unlink(missing_ok=True)
    recorded = _recorded(job)
    if recorded is None and job.output.exists():
        raise BulkError(f"{job.output} exists: remove it, name another output, or use --restart.")
    if recorded is not None and recorded != manifest:
        changed = _changed(recorded, manifest)
        raise BulkError(
            f"{job.parts} belongs to another job ({', '.join(changed)} changed): use --restart to"
            " delete it, or name another output."
        )
    if recorded is None:
        shutil.rmtree(job.parts, ignore_errors=True)
        job.parts.mkdir()
        _write(
            job.parts / "manifest.json",
            lambda file: file.write(json.dumps(manifest, indent=1).encode()),
        )


def _changed(recorded: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """The names of the entries that differ; of the settings, those of the single ones."""
    old, new = (one | one.get("settings", {}) for one in (dict(recorded), dict(manifest)))
    keys = [*new, *(key for key in old if key not in new)]
    return [key for key in keys if key != "settings" and old.get(key) != new.get(key)]


def _recorded(job: Job) -> dict[str, Any] | None:
    path = job.parts / "manifest.json"
    if not path.exists():
        return None
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def _write(path: Path, content: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that it is either complete or absent."""
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---- the output ----------------------------------------------------------------------------------


def _assemble(job: Job, num_lines: int) -> list[int]:
    """Write the output from the parts, with one part at a time in memory.

    Returns the numbers (from 1) of the lines whose vectors are NaN. Raises BulkError if there is
    one, and the numbers of the output have no NaN.
    """
    missing: list[int] = []

    def parts() -> Iterator[npt.NDArray[Any]]:
        start = 1
        for path in sorted(job.parts.glob("*.npy")):
            vectors: FloatArray = np.load(path)
            missing.extend((start + np.flatnonzero(np.isnan(vectors[:, 0]))).tolist())
            if missing and job.numbers in (*BYTES, *BITS):
                raise BulkError(
                    f"line {missing[0]} of {job.input} has no vector, and {job.numbers} has no NaN"
                    " to say so: give --embed-dtype float32. What was computed is kept."
                )
            start += len(vectors)
            scaled = normalized(vectors) if job.numbers in BYTES else vectors
            yield converted(scaled, job.numbers, job.int8_range)

    if job.output.suffix == ".npy":
        _write(job.output, lambda file: write_npy(file, parts(), num_lines))
    else:
        _write(job.output, lambda file: write_parquet(file, parts(), _ids(job)))
    return missing


def _ids(job: Job) -> Iterator[str | None] | None:
    """The ids of the lines, in order. None if the first line has no id."""
    if job.input.suffix != ".jsonl" or "id" not in _object(job, next(_lines(job.input)), 1):
        return None
    return (_text(_object(job, line, n).get("id")) for n, line in enumerate(_lines(job.input), 1))


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
