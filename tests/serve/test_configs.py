"""The shipped YAML files, as Serve reads them. No server: what cannot run here is still checked to
the last key."""

import pytest
from ray.serve.schema import ServeDeploySchema
from serve_process import REPOSITORY, shipped_config

from deployments.config.args import AppArgs
from deployments.config.checks import RESERVED_DEPLOYMENTS
from deployments.config.encoders import EncoderArgs
from deployments.encoder.replica import Embedder
from deployments.generator.replica import ModelReplica
from deployments.ingress.router import CfgRouter

NAMES = [path.stem for path in sorted((REPOSITORY / "configs").glob("*.yaml"))]


@pytest.fixture(params=NAMES)
def config(request):
    return shipped_config(request.param)


def test_serve_understands_every_key(config):
    """Serve ignores keys that it does not know, on some levels: so compare what it read with what
    was written."""
    schema = ServeDeploySchema.model_validate(config)
    (application,), (written,) = schema.applications, config["applications"]
    assert set(config) <= set(ServeDeploySchema.model_fields)
    assert set(config["http_options"]) <= set(type(schema.http_options).model_fields)
    assert set(written) <= set(type(application).model_fields)
    for deployment, keys in zip(application.deployments, written["deployments"], strict=True):
        assert set(keys) <= set(type(deployment).model_fields)


def test_deployments_carry_the_names_of_the_classes(config):
    """CfgRouter, ModelReplica if there is a generator, and the deployments that the encoders
    name."""
    application = config["applications"][0]
    args = AppArgs.model_validate(application["args"])
    names = [deployment["name"] for deployment in application["deployments"]]
    generator = [ModelReplica.name] if args.model else []
    assert names == [CfgRouter.name, *generator, *(encoder.deployment for encoder in args.encoders)]


def test_the_default_deployment_name_is_the_class():
    assert EncoderArgs(model="m").deployment == Embedder.name
    assert (CfgRouter.name, ModelReplica.name) == RESERVED_DEPLOYMENTS


def test_a_replica_has_a_gpu_for_each_worker(config):
    """One bundle per worker; the first also holds the replica itself."""
    application = config["applications"][0]
    args = AppArgs.model_validate(application["args"])
    replica = next((d for d in application["deployments"] if d["name"] == ModelReplica.name), {})
    bundles = replica.get("placement_group_bundles", [])
    assert len(bundles) == (args.num_workers if args.num_workers > 1 else 0)
    assert all(bundle["GPU"] == 1 for bundle in bundles)
    if bundles:
        assert replica["ray_actor_options"]["num_cpus"] <= bundles[0]["CPU"]
        assert "num_gpus" not in replica["ray_actor_options"]


def test_the_laptop_fits_two_cores():
    deployments = shipped_config("cfg")["applications"][0]["deployments"]
    assert sum(deployment["ray_actor_options"]["num_cpus"] for deployment in deployments) <= 2
