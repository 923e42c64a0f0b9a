"""`cfg-serve check` reads Ray Serve's keys from its source, and lets Ray check their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import config as serve_config
from ray.serve import schema

from cfg_serve.check import file, serve_fields
from cfg_serve.check.command import problems
from cfg_serve.check.ray_values import problems_of
from cfg_serve.cli import main
from cfg_serve.generate.choices import Wanted, configuration
from cfg_serve.generate.model_facts import ModelFacts
from cfg_serve.machine import GIB, Machine
from cfg_serve.start.preflight import ROUTER_CPUS

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("section", serve_fields.CLASSES)
def test_the_keys_are_those_of_rays_classes(section: str) -> None:
    name = serve_fields.CLASSES[section]
    cls = getattr(schema, name, None) or getattr(serve_config, name)
    assert serve_fields.known(section) == set(cls.model_fields)


def test_what_the_router_asks_for_by_itself() -> None:
    from deployments.ingress.router import CfgRouter

    assert CfgRouter.ray_actor_options["num_cpus"] == ROUTER_CPUS


def given(part: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    application = {
        "name": "cfg",
        "import_path": "deployments.app:build",
        "args": {"model": "models/stories"},
        "deployments": [] if part is None else [{"name": "ModelReplica", **part}],
    }
    return {"applications": [application], **top}


REFUSED: list[tuple[dict[str, Any], str]] = [
    # the configuration, its sentence
    (
        given(proxy_location="Nowhere"),
        "`proxy_location`: Input should be 'Disabled', 'HeadOnly' or 'EveryNode'.",
    ),
    (
        given(http_options={"request_timeout_s": "long"}),
        "`http_options.request_timeout_s`: Input should be a valid number, unable to parse string"
        " as a number.",
    ),
    (
        given({"num_replicas": 0}),
        "`deployments.ModelReplica.num_replicas`: Input should be greater than 0.",
    ),
    (
        given({"num_replicas": "two"}),
        '`deployments.ModelReplica`: `num_replicas` must be an int or "auto", but got: two.',
    ),
    (
        given({"num_replicas": 1, "autoscaling_config": {"min_replicas": 1}}),
        "`deployments.ModelReplica`: Manually setting num_replicas is not allowed when"
        " autoscaling_config is provided.",
    ),
    (
        given({"autoscaling_config": {"min_replicas": 3, "max_replicas": 1}}),
        "`autoscaling_config` of `ModelReplica`: max_replicas (1) must be greater than or equal to"
        " min_replicas (3).",
    ),
    (
        given({"max_ongoing_requests": 0}),
        "`deployments.ModelReplica.max_ongoing_requests`: Input should be greater than 0.",
    ),
    (
        given({"graceful_shutdown_timeout_s": -1}),
        "`deployments.ModelReplica.graceful_shutdown_timeout_s`: Input should be greater than or"
        " equal to 0.",
    ),
    (
        given({"ray_actor_options": {"num_cpus": "one"}}),
        "`deployments.ModelReplica.ray_actor_options.num_cpus`: Input should be a valid number,"
        " unable to parse string as a number.",
    ),
    (
        given({"ray_actor_options": {"runtime_env": {"working_dir": "/here"}}}),
        "`deployments.ModelReplica.ray_actor_options.runtime_env`: runtime_envs in the Serve config"
        " support only",
    ),
    (
        given({"placement_group_bundles": [{"GPU": "all"}]}),
        "`deployments.ModelReplica.placement_group_bundles.0.GPU`: Input should be a valid number,",
    ),
    (
        given({"placement_group_strategy": "PACKED"}),
        "`placement_group_strategy` of `ModelReplica` is 'PACKED': use one of PACK, SPREAD,",
    ),
]


@pytest.mark.parametrize(("config", "sentence"), REFUSED, ids=lambda value: str(value)[:60])
def test_values_that_ray_refuses(config: dict[str, Any], sentence: str) -> None:
    assert list(file.problems_of(config)) == []
    (problem,) = problems_of(config)
    assert problem.said.startswith(sentence)
    assert problem.said.endswith(".")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_files_are_right(path: Path) -> None:
    assert problems(path, with_ray=True) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("parallel", [1, 2])
def test_ray_takes_what_is_chosen(device: Any, parallel: int) -> None:
    facts = ModelFacts(path="org/m", is_local=False)
    machine = Machine(device=device, cores=8, gpus=4, memory_bytes=9 * GIB, total_bytes=9 * GIB)
    wanted = Wanted(tensor_parallel=parallel, replicas=2)
    assert problems_of(configuration(wanted, facts, [facts], machine)) == []


def test_the_command_tells_what_ray_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(given({"num_replicas": 0})))
    assert main(["check", str(path)]) == 1
    line = path.read_text().splitlines().index("    num_replicas: 0") + 1
    sentence = f"{path}:{line}: `deployments.ModelReplica.num_replicas`: Input should be"
    assert capsys.readouterr().err.startswith(sentence)
    assert main(["check", "--no-ray", str(path)]) == 0
