"""Write every page, or part of one, that comes from the code, and the files of deploy/.

make pages          or: python scripts/pages.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import command_page
import config_page
import fields_page
import grafana_dashboard
import kuberay
import metrics_page
import models_page
import patches

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
