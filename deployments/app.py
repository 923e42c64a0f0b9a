"""The Serve application: `import_path: deployments.app:build` in a YAML file."""

# No `from __future__ import annotations` here: Serve reads the annotation of `build`.

from ray.serve import Application

from deployments.config import AppArgs
from deployments.embedder import Embedder
from deployments.replica import ModelReplica
from deployments.router import CfgRouter


def build(args: AppArgs) -> Application:
    """CfgRouter in front of ModelReplica and of an Embedder for each encoder. A mistake in `args` is raised here,
    before anything starts."""
    args = args.resolved()
    generator = ModelReplica.bind(args) if args.model else None
    encoders = {e.model_name: Embedder.options(name=e.deployment).bind(e) for e in args.encoders}
    return CfgRouter.bind(generator, encoders, args)
