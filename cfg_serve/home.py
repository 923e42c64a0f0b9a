"""Where things are: the checkout, Serve's own settings, the logs."""

from __future__ import annotations

import os
import tempfile
import time
from importlib import resources
from pathlib import Path

KEPT_LOGS = 10
LOGS = "CFG_SERVE_LOGS"
"""Environment variable: the folder of the logs, in place of the usual one."""


def checkout() -> Path | None:
    """The checkout that this package is part of; None if it was installed from a wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def serve_settings() -> dict[str, str]:
    """The variables of configs/serve.env and their values. A wheel has the file, too."""
    lines = (resources.files("cfg_serve") / "serve.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def new_log() -> Path:
    """An empty file for the log of this run, which is kept. Only the newest KEPT_LOGS stay.

    Only this user can read it. If the usual folder cannot be written, it is in a temporary one.
    """
    try:
        folder = log_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _file_in(folder)
    except OSError:
        return _file_in(Path(tempfile.mkdtemp(prefix="cfg-serve-log-")))


def log_folder() -> Path:
    """$CFG_SERVE_LOGS, or the usual folder for the state of a user's programs."""
    if given := os.environ.get(LOGS):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "cfg-serve" / "logs"


def _file_in(folder: Path) -> Path:
    path = folder / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path.touch(mode=0o600)
    for old in sorted(folder.glob("serve-*.log"))[:-KEPT_LOGS]:
        old.unlink(missing_ok=True)
    return path
