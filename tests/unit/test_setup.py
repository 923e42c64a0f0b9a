"""scripts/machine.py: which interpreter the set-up takes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import machine


def test_an_interpreter_has_one_name(tmp_path):
    """The name is the same through a link, and from inside an environment made of the interpreter.

    Otherwise `make` would set up again whenever the caller changes.
    """
    _, path = machine.ask_version(sys.executable)
    link = tmp_path / "python"
    link.symlink_to(path)
    assert machine.ask_version(str(link)) == machine.ask_version(sys.executable)
    assert machine.ask_version(str(tmp_path / "none")) is None
