"""Reads configs/serve.env, for all that start Ray: scripts/serve.py, scripts/kuberay.py, tests."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "configs" / "serve.env"


def serve_settings() -> dict[str, str]:
    """The variables of configs/serve.env and their values."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
