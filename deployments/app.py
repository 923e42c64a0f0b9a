"""The Serve application: `import_path: deployments.app:build` in a YAML file."""

# No `from __future__ import annotations` here: Serve reads the annotation of `build`.

from ray.serve import Application

from deployments.config import AppArgs
from deployments.replica import ModelReplica
from deployments.router import CfgRouter


def build(args: AppArgs) -> Application:
    """CfgRouter in front of ModelReplica. A mistake in `args` is raised here, before anything starts."""
    args = args.resolved()
    return CfgRouter.bind(ModelReplica.bind(args), args)
