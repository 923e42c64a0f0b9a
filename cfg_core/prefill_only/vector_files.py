"""Writes files of vectors, of which one part at a time is in memory.

A part is an array [lines, width]. All parts of a file have one width and one type.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import IO, Any

import numpy as np
import numpy.typing as npt


def write_npy(file: IO[bytes], parts: Iterator[npt.NDArray[Any]], num_lines: int) -> None:
    """num_lines: of all parts together, at least one."""
    first = next(parts)
    shape = (num_lines, first.shape[1])
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
    for part in chain([first], parts):
        file.write(part.tobytes())


def write_parquet(
    file: IO[bytes], parts: Iterator[npt.NDArray[Any]], ids: Iterator[str | None] | None
) -> None:
    """Write one row group for each part, with the columns index, id (if there are) and embedding.

    It needs pyarrow.
    """
    import pyarrow as pa
    from pyarrow import parquet

    first = next(parts)
    width = first.shape[1]
    columns = [("index", pa.int64()), *([] if ids is None else [("id", pa.string())])]
    vector = pa.list_(pa.from_numpy_dtype(first.dtype), width)
    schema = pa.schema([*columns, ("embedding", vector)])
    start = 0
    with parquet.ParquetWriter(file, schema) as writer:
        for part in chain([first], parts):
            arrays = [pa.array(range(start, start + len(part)), pa.int64())]
            if ids is not None:
                arrays.append(pa.array(list(islice(ids, len(part))), pa.string()))
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), width))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            start += len(part)
