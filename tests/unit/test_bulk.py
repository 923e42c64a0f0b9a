"""Files of vectors: complete, and with the same bytes however often the job was interrupted."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import numpy as np
import pytest

from cfg_core.errors import RequestError
from cfg_core.prefill_only import bulk
from cfg_core.prefill_only.bulk import BulkError, Job
from cfg_core.prefill_only.stages.outputs import normalized
from cfg_core.prefill_only.vector_formats import BYTES, NUMBERS, converted

DIMENSION = 3
LINES = [f"text {i}" for i in range(23)]


def embed(texts) -> np.ndarray:
    return np.array([[len(text), hash_of(text), 1.0] for text in texts], dtype=np.float32)


def hash_of(text: str) -> float:
    return sum(map(ord, text)) % 97


def job(folder: Path, output: str = "out.npy", **fields) -> Job:
    (folder / "in.txt").write_text("\n".join(LINES) + "\n")
    return Job(
        input=folder / "in.txt",
        output=folder / output,
        **{"lines_per_part": 5, "settings": {"model": "m"}, **fields},
    )


def run(it: Job, embed=embed, **options) -> list[int]:
    return bulk.run(it, embed, DIMENSION, progress=lambda _: None, **options)


def test_npy(tmp_path):
    it = job(tmp_path)
    assert run(it) == []
    np.testing.assert_array_equal(np.load(it.output), embed(LINES))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def test_parquet(tmp_path):
    from pyarrow import parquet

    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"doc-{i}", "body": text}) + "\n" for i, text in enumerate(LINES))
    )
    it = Job(input=path, output=tmp_path / "out.parquet", text_field="body", lines_per_part=5)
    run(it)
    table = parquet.read_table(it.output)
    assert table["index"].to_pylist() == list(range(23))
    assert table["id"].to_pylist()[22] == "doc-22"
    np.testing.assert_array_equal(np.stack(table["embedding"].to_pylist()), embed(LINES))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("output", ["out.npy", "out.parquet"])
def test_numbers_of_the_output(tmp_path, output, numbers):
    """Each vector is what the API would answer, and parts do not depend on the numbers."""
    from pyarrow import parquet

    def eight(texts):
        return np.random.default_rng(len(texts)).normal(size=(len(texts), 8)).astype(np.float32)

    it = job(tmp_path, output, numbers=numbers, int8_range=0.5)
    bulk.run(it, eight, 8, progress=lambda _: None)
    vectors = np.concatenate([eight(range(5))] * 4 + [eight(range(3))])
    whole = normalized(vectors) if numbers in BYTES else vectors
    want = converted(whole, numbers, 0.5)
    if output == "out.npy":
        found = np.load(it.output)
    else:
        table = parquet.read_table(it.output)
        assert table["index"].to_pylist() == list(range(23))
        assert table.schema.field("embedding").type.list_size == want.shape[1]
        found = np.array(table["embedding"].to_pylist(), dtype=want.dtype)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


def test_bytes_cannot_say_that_a_vector_is_missing(tmp_path):
    def some(texts):
        vectors = embed(texts)
        vectors[[text == "text 9" for text in texts]] = np.nan
        return vectors

    with pytest.raises(BulkError, match=r"line 10 of .* has no vector, and int8 has no NaN"):
        run(job(tmp_path, numbers="int8"), some)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy.parts"]

    def never(texts):
        raise AssertionError("the parts are kept")

    assert run(job(tmp_path), never) == [10]


def test_bits_that_fill_no_bytes(tmp_path):
    with pytest.raises(RequestError, match="3 components, and binary needs a multiple of 8"):
        run(job(tmp_path, numbers="ubinary"))


class Cut(BaseException):
    """Stands for a kill of the process: no code catches it."""


@pytest.mark.parametrize("output", ["out.npy", "out.parquet"])
def test_interrupted_before_every_step(tmp_path, output, monkeypatch):
    """Stop before the n-th rename, for every n, and resume.

    The output has the same bytes, and no part is computed twice.
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    run(job(whole, output))
    expected = (whole / output).read_bytes()
    rename = Path.rename
    for cut_at in range(1, 8):  # a manifest, five parts, the output; then none
        folder = tmp_path / str(cut_at)
        folder.mkdir()
        it, calls, embedded = job(folder, output), 0, []

        def cut(self: Path, target: Path, cut_at: int = cut_at) -> Path:
            nonlocal calls
            calls += 1
            if calls == cut_at:
                raise Cut
            return rename(self, target)

        def counted(texts, embedded: list = embedded) -> np.ndarray:
            embedded.extend(texts)
            return embed(texts)

        monkeypatch.setattr(Path, "rename", cut)
        with pytest.raises(Cut):
            run(it, counted)
        assert not it.output.exists()
        run(it, counted)
        monkeypatch.setattr(Path, "rename", rename)
        assert it.output.read_bytes() == expected
        assert len(embedded) - len(LINES) <= 5, "at most one part is computed again"


def test_interrupted_between_output_and_cleanup(tmp_path, monkeypatch):
    it = job(tmp_path)

    def cut(path: Path, **options) -> None:
        if it.output.exists():
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(bulk.shutil, "rmtree", cut)
        with pytest.raises(Cut):
            run(it)
    assert it.parts.exists()
    assert run(it) == []
    assert not it.parts.exists()
    np.testing.assert_array_equal(np.load(it.output), embed(LINES))


def test_texts_without_a_vector_are_reported_by_line(tmp_path):
    def some(texts):
        vectors = embed(texts)
        vectors[[text in ("text 4", "text 20") for text in texts]] = np.nan
        return vectors

    it = job(tmp_path)
    assert run(it, some) == [5, 21]
    assert np.isnan(np.load(it.output)).any(1).nonzero()[0].tolist() == [4, 20]


def fail_late(texts):
    if "text 12" in texts:
        raise Cut
    return embed(texts)


def test_parts_of_another_job_are_not_mixed_in(tmp_path):
    it = job(tmp_path)

    with pytest.raises(Cut):
        run(it, fail_late)
    (tmp_path / "in.txt").write_text("other\n" * 23)
    with pytest.raises(BulkError, match=r"another job \(sha256 changed\): use --restart"):
        run(it)
    run(it, restart=True)
    assert (np.load(it.output) == embed(["other"])).all()


def test_other_settings(tmp_path):
    """Vectors that two types computed do not mix."""
    it = job(tmp_path, settings={"model": "m", "dtype": "float32"})
    with pytest.raises(Cut):
        run(it, fail_late)
    other = job(tmp_path, settings={"model": "m", "dtype": "bfloat16"})
    with pytest.raises(BulkError, match=r"another job \(dtype changed\): use --restart"):
        run(other)


def test_an_output_is_not_overwritten(tmp_path):
    it = job(tmp_path)
    run(it)
    with pytest.raises(BulkError, match="exists: remove it, name another output, or use --restart"):
        run(it)
    assert run(it, restart=True) == []


def test_two_processes_do_not_share_an_output(tmp_path):
    it = job(tmp_path)
    with (tmp_path / "out.npy.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BulkError, match="another process is writing"):
            run(it)


@pytest.mark.parametrize(
    ("name", "content", "output", "words"),
    [
        ("in.csv", "a", "out.npy", "must be a .txt or .jsonl file"),
        ("in.txt", None, "out.npy", "does not exist"),
        ("in.txt", "a", "out.csv", "must end in .npy or .parquet"),
        ("in.txt", "a", "no/out.npy", "make that directory first"),
        ("in.txt", "", "out.npy", "is empty"),
        (
            "in.jsonl",
            '{"text": "a"}\n{"txt": "b"}\n',
            "out.npy",
            "line 2 .* has no text in 'text': .*--field",
        ),
        ("in.jsonl", "{", "out.npy", "line 1 .* is not valid JSON"),
    ],
)
def test_what_is_refused(tmp_path, name, content, output, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BulkError, match=words):
        run(Job(input=tmp_path / name, output=tmp_path / output))
    assert not (tmp_path / output).exists()


def test_not_utf8(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BulkError, match="is not UTF-8"):
        run(Job(input=tmp_path / "in.txt", output=tmp_path / "out.npy"))
