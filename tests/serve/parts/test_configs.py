"""The shipped YAML files, as Serve reads them.

These tests need no server, so they also check files that cannot run on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from ray.serve import Deployment
from ray.serve.schema import ServeDeploySchema

from deployments import app
from deployments.config.args import AppArgs
from deployments.config.checks import RESERVED_DEPLOYMENTS
from deployments.config.encoders import EncoderArgs
from deployments.encoder.replica import Embedder
from deployments.generator.replica import ModelReplica
from deployments.ingress.router import CfgRouter
from tools.serving.process import REPOSITORY, Json, shipped_config

# `serve.deployment` makes Deployments of classes, but mypy ignores what a class decorator returns.
ROUTER, GENERATOR, ENCODER = (
    cast(Deployment, cls).name for cls in (CfgRouter, ModelReplica, Embedder)
)
NAMES = [path.stem for path in sorted((REPOSITORY / "configs").glob("*.yaml"))]


@pytest.fixture(params=NAMES)
def config(request: pytest.FixtureRequest) -> Json:
    return shipped_config(request.param)


def test_serve_understands_every_key(config: Json) -> None:
    """Every key of the file is a field of Serve's schema.

    Serve ignores unknown keys on some levels, so this test compares the keys.
    """
    schema = ServeDeploySchema.model_validate(config)
    (application,), (written,) = schema.applications, config["applications"]
    assert set(config) <= set(ServeDeploySchema.model_fields)
    assert set(config["http_options"]) <= set(type(schema.http_options).model_fields)
    assert set(written) <= set(type(application).model_fields)
    for deployment, keys in zip(application.deployments, written["deployments"], strict=True):
        assert set(keys) <= set(type(deployment).model_fields)


def test_deployments_carry_the_names_of_the_classes(config: Json) -> None:
    """The deployments are CfgRouter, those of the generators (ModelReplica), and the encoders'."""
    application = config["applications"][0]
    args = AppArgs.model_validate(application["args"])
    names = [deployment["name"] for deployment in application["deployments"]]
    generators = [generator.deployment for generator in args.generators]
    assert generators[:1] == [GENERATOR] * bool(generators)
    assert names == [ROUTER, *generators, *(encoder.deployment for encoder in args.encoders)]


def test_the_default_deployment_name_is_the_class() -> None:
    assert EncoderArgs(model="m").deployment == ENCODER
    assert AppArgs(model="m").deployment == GENERATOR
    assert (ROUTER, GENERATOR) == RESERVED_DEPLOYMENTS


def test_a_replica_has_a_gpu_for_each_worker(config: Json) -> None:
    """The placement group has one bundle per worker. The first also holds the replica."""
    application = config["applications"][0]
    args = AppArgs.model_validate(application["args"])
    deployments: list[Json] = application["deployments"]
    replica = next((d for d in deployments if d["name"] == GENERATOR), {})
    bundles = replica.get("placement_group_bundles", [])
    assert len(bundles) == (args.num_workers if args.num_workers > 1 else 0)
    assert all(bundle["GPU"] == 1 for bundle in bundles)
    if bundles:
        assert replica["ray_actor_options"]["num_cpus"] <= bundles[0]["CPU"]
        assert "num_gpus" not in replica["ray_actor_options"]


def test_an_application_without_its_model_serves_the_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    monkeypatch.setattr(app.logger, "warning", told.append)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    args = AppArgs.model_validate(shipped_config("cfg")["applications"][0]["args"])
    missing = args.model_copy(update={"model": str(tmp_path / "none")})
    app.build(missing)
    assert told == [missing.missing_model()]
    assert missing.resolved().served_names == ["stories", "all-MiniLM-L6-v2"]


@pytest.mark.parametrize("name", ["cfg", "stories", "two-models"])
def test_the_laptop_fits_two_cores(name: str) -> None:
    deployments = shipped_config(name)["applications"][0]["deployments"]
    assert sum(deployment["ray_actor_options"]["num_cpus"] for deployment in deployments) <= 2
