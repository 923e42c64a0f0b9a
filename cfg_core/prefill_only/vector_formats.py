"""Formats of fewer bits for the numbers of dense vectors. Pure, numpy only.

    float16           half precision
    int8, uint8       one byte for each component, on a fixed scale
    binary, ubinary   one bit for each component, eight in a byte: 1 if it is above 0

The scale of a byte does not depend on the vector, so that products of two vectors keep their order:
components from -r to r become -127 to 127 (int8) or 1 to 255 (uint8), and those beyond are cut. For
normalised vectors of n components, r is 6 / sqrt(n), six times their root mean square, unless the
engine's option `int8_range` says otherwise. `binary` holds the bytes of `ubinary` less 128.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from cfg_core.errors import RequestError
from cfg_core.prefill_only.types import FloatArray

Number: TypeAlias = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
NUMBERS: tuple[Number, ...] = get_args(Number)
BYTES: tuple[Number, ...] = ("int8", "uint8")
BITS: tuple[Number, ...] = ("binary", "ubinary")

_RANGE = 6.0


def bytes_of(number: Number) -> float:
    """Bytes of one component."""
    if number in BITS:
        return 1 / 8
    return {"float32": 4.0, "float16": 2.0}.get(number, 1.0)


def check_bits(width: int, param: str = "embed_dtype") -> None:
    """Raise RequestError if bits of so many components do not fill bytes."""
    if width % 8:
        raise RequestError(
            f"these vectors have {width} components, and binary needs a multiple of 8: ask for int8"
            " or float.",
            param,
        )


def converted(
    vectors: FloatArray, number: Number, int8_range: float | None = None
) -> npt.NDArray[Any]:
    """Vectors [..., n] in another format: [..., n], or [..., n / 8] for bits.

    For bits, n must be a multiple of 8. The numbers are little-endian.
    """
    if number in BITS:
        check_bits(vectors.shape[-1])
        packed = np.packbits(vectors > 0, axis=-1)
        return packed if number == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
    if number in BYTES:
        reach = int8_range or _RANGE / np.sqrt(vectors.shape[-1])
        levels = np.clip(np.rint(vectors * (127 / reach)), -127, 127)
        return levels.astype(np.int8) if number == "int8" else (levels + 128).astype(np.uint8)
    return vectors.astype("<f2" if number == "float16" else "<f4")
