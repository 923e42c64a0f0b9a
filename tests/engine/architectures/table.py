"""All rows."""

from __future__ import annotations

from architectures import dense, formats, moe, recurrent, stand_ins, vision

ARCHITECTURES = (*dense.ROWS, *moe.ROWS, *recurrent.ROWS, *stand_ins.ROWS, *vision.ROWS)
FORMATS = formats.ROWS
ROWS = (*ARCHITECTURES, *FORMATS)
