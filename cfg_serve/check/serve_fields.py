"""Which keys Ray Serve knows, read from its source: importing Ray takes more than a second.

A key that Serve does not know it drops in silence, so `num_replica: 2` would serve one replica.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FILES = ("schema.py", "config.py")
CLASSES = {
    "file": "ServeDeploySchema",
    "http_options": "HTTPOptionsSchema",
    "grpc_options": "gRPCOptionsSchema",
    "logging_config": "LoggingConfig",
    "applications": "ServeApplicationSchema",
    "deployments": "DeploymentSchema",
    "ray_actor_options": "RayActorOptionsSchema",
    "autoscaling_config": "AutoscalingConfig",
}
"""A section of the file, and the class of Serve that says which keys it has."""


def known(section: str) -> frozenset[str] | None:
    """The keys of a section; None if Ray is not installed, or has no such class."""
    return _fields().get(CLASSES[section])


@cache
def _fields() -> dict[str, frozenset[str]]:
    spec = importlib.util.find_spec("ray")
    roots = (
        [Path(root) / "serve" for root in (spec.submodule_search_locations or ())] if spec else []
    )
    files = [root / name for root in roots for name in FILES if (root / name).is_file()]
    wanted = frozenset(CLASSES.values())
    found = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in wanted:
                found[node.name] = frozenset(_public(node))
    return found


def _public(node: ast.ClassDef) -> Iterator[str]:
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            if not name.startswith("_") and name != "model_config":
                yield name
