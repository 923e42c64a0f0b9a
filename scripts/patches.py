"""Write docs/patches.md from the three tables of patches.

python scripts/patches.py
"""

from __future__ import annotations

from pathlib import Path

import cfg_core.prefill_only.patches
import deployments.patches
from cfg_core.patches import as_markdown
from cfg_core.vllm_plugin import patches

PAGE = Path(__file__).resolve().parent.parent / "docs" / "patches.md"

HEAD = """# What is replaced inside other packages
cfg-serve runs on stock vLLM. vLLM lets its users name a scheduler and a worker class, and subclass
its GPU worker. Where it has no hook, we replace its code at run time, and only in processes that
run a guided engine. An unguided vLLM in the same environment stays as it is. Each replacement is a
row here. The named test fails when the replacement is no longer needed or no longer works. This
page is written by `python scripts/patches.py`.
"""


def page() -> str:
    """The text of docs/patches.md."""
    return (
        f"{HEAD}\n## The vLLM plugin\n{as_markdown(patches.PATCHES)}"
        f"\n## The Serve application\n{as_markdown(deployments.patches.PATCHES)}"
        f"\n## The prefill-only engine\n{as_markdown(cfg_core.prefill_only.patches.PATCHES)}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
