"""Print, as JSON, what our source uses of other packages and what it is in this environment.

    python scripts/versions/foreign_names.py OUTPUT [EARLIER]

EARLIER: an earlier output. Its targets are described here too, so that the two can be compared.
scripts/versions/drift.py runs this in two environments.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm

from cfg_core.compat import check, classes
from cfg_core.compat.inventory import describe
from cfg_core.vllm_plugin import versions, vllm_patches
from deployments import serve_patches


def collect(earlier: dict[str, Any]) -> dict[str, Any]:
    """`uses` by module of ours, and `what` each target is: shape and body."""
    uses = {
        module: [asdict(use) for use in check.uses(path, module)]
        for package in ("cfg_core", "deployments")
        for module, path in check.modules(package)
        if not versions.is_for_another(path)
    }
    for table in (vllm_patches, serve_patches):
        rows = [row for row in table.ROWS if row.target.partition(".")[0] in classes.PACKAGES]
        uses[table.__name__] = [asdict(use) for use in check.row_uses(rows)]
    targets = {use["target"] for found in uses.values() for use in found}
    return {
        "vllm": vllm.__version__,
        "uses": {module: found for module, found in uses.items() if found},
        "what": {t: asdict(describe(t)) for t in sorted(targets | {*earlier.get("what", ())})},
    }


if __name__ == "__main__":
    output, *given = map(Path, sys.argv[1:])
    earlier = json.loads(given[0].read_text(encoding="utf-8")) if given else {}
    output.write_text(json.dumps(collect(earlier), indent=1), encoding="utf-8")
