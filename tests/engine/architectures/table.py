"""All rows."""

from __future__ import annotations

from architectures import dense, moe, recurrent, stand_ins, vision

ROWS = (*dense.ROWS, *moe.ROWS, *recurrent.ROWS, *stand_ins.ROWS, *vision.ROWS)
