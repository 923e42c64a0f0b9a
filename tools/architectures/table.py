"""All rows."""

from __future__ import annotations

from tools.architectures import (
    dense,
    formats,
    moe,
    recurrent,
    stand_ins_dense,
    stand_ins_moe,
    stand_ins_rest,
    vision,
)

_MODULES = (dense, moe, recurrent, stand_ins_dense, stand_ins_moe, stand_ins_rest, vision)
ARCHITECTURES = tuple(row for module in _MODULES for row in module.ROWS)
FORMATS = formats.ROWS
ROWS = (*ARCHITECTURES, *FORMATS)
