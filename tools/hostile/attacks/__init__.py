"""The attacks. To import this package registers them all in `attempt.ATTACKS`."""

from tools.hostile.attacks import (
    bodies,
    connections,
    encoders,
    fuzz,
    grammars,
    heads,
    limits,
    media,
    protocol,
    shapes,
    streams,
)

__all__ = [
    "bodies",
    "connections",
    "encoders",
    "fuzz",
    "grammars",
    "heads",
    "limits",
    "media",
    "protocol",
    "shapes",
    "streams",
]
