"""scripts/setup.py: which interpreter it takes."""

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "scripts" / "setup.py"


def load():
    spec = importlib.util.spec_from_file_location("cfg_serve_setup", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interpreter_has_one_name(tmp_path):
    """Asked by a link, and from within an environment made of it: else `make` sets up again, in
    turns."""
    setup = load()
    _, path = setup.ask_version(sys.executable)
    link = tmp_path / "python"
    link.symlink_to(path)
    assert setup.ask_version(str(link)) == setup.ask_version(sys.executable)
    assert setup.ask_version(str(tmp_path / "none")) is None
