"""Write every page, or part of one, that comes from the code, and the files of deploy/.

make pages          # or: python scripts/pages/write.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "scripts")]

import command_page  # noqa: E402
import config_page  # noqa: E402
import fields_page  # noqa: E402
import grafana_dashboard  # noqa: E402
import kuberay  # noqa: E402
import metrics_page  # noqa: E402
import models_page  # noqa: E402
import patches  # noqa: E402

WRITTEN: dict[Path, Callable[[str], str]] = {
    command_page.PAGE: command_page.page,
    config_page.PAGE: config_page.page,
    metrics_page.PAGE: metrics_page.page,
    **{path: partial(fields_page.page, path) for path in fields_page.TABLES},
    models_page.PAGE: lambda _: models_page.page(),
    patches.PAGE: lambda _: patches.page(),
    grafana_dashboard.FILE: lambda _: grafana_dashboard.text(),
    kuberay.FILE: lambda _: kuberay.shown(),
}
"""What is written, with what makes its text of the present one."""


def main() -> None:
    """Write what is not current, and name it."""
    for path, made in WRITTEN.items():
        before = path.read_text(encoding="utf-8")
        if (text := made(before)) != before:
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: written")


if __name__ == "__main__":
    main()
