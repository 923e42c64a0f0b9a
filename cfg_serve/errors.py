"""What the command tells its user instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot do what it was asked. The message says why, and what to do."""
