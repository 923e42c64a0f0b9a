"""The configurations for clusters: what can be checked without a cluster.

The manifest and the Containerfile are checked in test_deploy_files.py.
"""

import inspect
import math
from pathlib import Path

import pytest
import yaml

from cfg_serve.check.file import problems
from deployments.autoscaling import GuidedLoad
from deployments.config.admission import SPARE
from deployments.config.args import AppArgs

REPOSITORY = Path(__file__).parents[2]
CONFIGS = {path.stem: path for path in sorted((REPOSITORY / "configs").glob("*.yaml"))}
ON_CLUSTERS = ("llama-8b-tp2", "mixed", "one-node-gpus", "tp4-across-nodes")


class Config:
    """A Serve configuration, by its parts.

    generator: the deployment of one generator; None if there is none.
    """

    def __init__(self, name, deployment="ModelReplica"):
        self.name, self.text = name, CONFIGS[name].read_text()
        self.whole = yaml.safe_load(self.text)
        (application,) = self.whole["applications"]
        self._args = application["args"]
        self.deployments = {
            deployment["name"]: deployment for deployment in application["deployments"]
        }
        self.generator = self.deployments.get(deployment)
        self._deployment = deployment

    @property
    def whole_args(self):
        return AppArgs.model_validate(self._args)

    @property
    def args(self):
        """As the generator reads them."""
        generators = self.whole_args.generators
        return next(one for one in generators if one.deployment == self._deployment)

    @staticmethod
    def most_replicas(deployment):
        return deployment.get("autoscaling_config", {}).get("max_replicas") or deployment.get(
            "num_replicas", 1
        )


@pytest.fixture(params=CONFIGS)
def config(request):
    return Config(request.param)


GENERATORS = [
    (name, generator.deployment)
    for name in CONFIGS
    for generator in Config(name).whole_args.generators
]


@pytest.fixture(params=GENERATORS, ids="-".join)
def generating(request):
    return Config(*request.param)


@pytest.fixture(params=ON_CLUSTERS)
def on_cluster(request):
    return Config(request.param)


# --- configurations -------------------------------------------------------------------------------


def test_no_configuration_has_mistakes(config):
    assert problems(CONFIGS[config.name]) == []


def test_one_gpu_in_one_bundle_for_each_worker(generating):
    """vLLM refuses a bundle with two GPUs. The replica itself runs in the first bundle."""
    bundles = generating.generator.get("placement_group_bundles")
    if generating.args.num_workers == 1:
        assert bundles is None
        return
    assert [bundle["GPU"] for bundle in bundles] == [1] * generating.args.num_workers
    assert generating.generator["ray_actor_options"]["num_cpus"] <= bundles[0]["CPU"]
    assert "num_gpus" not in generating.generator["ray_actor_options"]


def test_the_head_comment_guards_ray_before_it_starts_it(on_cluster):
    """In every shell: with the mode before `ray start` alone, later commands are refused."""
    head = [line.lstrip("# ") for line in on_cluster.text.splitlines() if line.startswith("#")]
    (exported,) = [i for i, line in enumerate(head) if "export RAY_AUTH_MODE=token" in line]
    starts = [i for i, line in enumerate(head) if "ray start" in line]
    made = next(i for i, line in enumerate(head) if "ray get-auth-token --generate" in line)
    assert made < exported < min(starts)
    assert not any("RAY_AUTH_MODE=token ray" in line for line in head)
    assert any("configs/serve.env" in line for line in head)


def test_who_may_call_is_asked_where_others_can(on_cluster):
    asked = "# access: {keys: [{name: team-a, env: CFG_SERVE_KEY_TEAM_A}]}"
    assert on_cluster.text.count(asked) == 1
    if on_cluster.whole["http_options"]["host"] != "127.0.0.1":
        head = [line.lstrip("# ") for line in on_cluster.text.splitlines() if line.startswith("#")]
        assert "all nodes belong on a private network" in " ".join(head).lower()


def test_the_claim_about_cpus_names_the_tests_that_make_it():
    """Stock vLLM refuses Ray on CPUs; a platform of the tests does not."""
    text = CONFIGS["tp4-across-nodes"].read_text()
    for path in ("tests/serve/tensor_parallel", "tests/support/ray_cpu"):
        assert path in text
        assert (REPOSITORY / path).is_dir()


def test_the_spanning_group_may_span():
    tp4 = Config("tp4-across-nodes")
    assert tp4.args.num_workers == 4
    assert tp4.generator["placement_group_strategy"] in ("PACK", "SPREAD")


def test_requests_in_a_replica_fit_its_streams(generating):
    """Fewer than half of the streams would leave the engine idle when all are guided. Far more than
    all would wait inside it, where no router can send them elsewhere."""
    streams = generating.args.engine["max_num_seqs"]
    assert (
        streams // 2 <= generating.generator["max_ongoing_requests"] <= math.ceil(SPARE * streams)
    )


def test_routers_together_fill_an_engine(on_cluster):
    """Each router counts for itself.

    Serve's own queue then stays empty. It knows neither tenants nor priorities.
    """
    sent = (
        on_cluster.args.admission.streams_per_replica
        * on_cluster.deployments["CfgRouter"]["num_replicas"]
    )
    assert sent == math.ceil(SPARE * on_cluster.args.engine["max_num_seqs"])
    assert on_cluster.generator["max_ongoing_requests"] >= sent


def test_overload_is_refused_with_429(generating):
    """Without max_queued_requests, Serve queues without a limit, and no client gets a 429."""
    assert (
        0
        < generating.generator["max_queued_requests"]
        <= 16 * generating.generator["max_ongoing_requests"]
    )


def test_the_router_does_not_throttle_the_engines(generating):
    router = generating.deployments["CfgRouter"]
    engines = (
        Config.most_replicas(generating.generator) * generating.generator["max_ongoing_requests"]
    )
    assert Config.most_replicas(router) * router["max_ongoing_requests"] >= engines


def test_scaling_down_waits_for_streams(generating):
    """Serve's default is 20 s. That is enough for applications with encoders only."""
    for name, deployment in generating.deployments.items():
        if "autoscaling_config" in deployment:
            assert deployment.get("graceful_shutdown_timeout_s", 0) > 20, name


def test_no_running_stream_is_cut(on_cluster):
    longest_s = on_cluster.whole["http_options"]["request_timeout_s"]
    for name in ("CfgRouter", "ModelReplica"):
        assert on_cluster.deployments[name]["graceful_shutdown_timeout_s"] >= longest_s, name


def test_health_is_checked(on_cluster):
    """The engine may answer late while it computes, so the timeout is longer than the period."""
    for name, deployment in on_cluster.deployments.items():
        if name != "CfgRouter":
            assert deployment["health_check_timeout_s"] > deployment["health_check_period_s"], name


def test_the_policy_can_be_reached(on_cluster):
    """A target above what a replica may hold never scales up. Serve hands policy_kwargs to classes
    only."""
    scaling = on_cluster.generator.get("autoscaling_config")
    if scaling is None:
        return
    policy = scaling["policy"]
    assert policy["policy_function"] == f"{GuidedLoad.__module__}:{GuidedLoad.__name__}"
    assert inspect.isclass(GuidedLoad)
    made = GuidedLoad(**policy["policy_kwargs"])
    most = min(on_cluster.generator["max_ongoing_requests"], on_cluster.args.engine["max_num_seqs"])
    assert made.target_streams <= most
    assert "target_ongoing_requests" not in scaling, "the policy does not read it"


def test_encoders_may_sleep_in_mixed_yaml():
    mixed = Config("mixed")
    assert [encoder.deployment for encoder in mixed.args.encoders] == ["Embedder", "Reranker"]
    for encoder in mixed.args.encoders:
        deployment = mixed.deployments[encoder.deployment]
        assert deployment["autoscaling_config"]["min_replicas"] == 0
        assert 0 < deployment["ray_actor_options"]["num_gpus"] < 1
    assert mixed.generator["autoscaling_config"]["min_replicas"] > 0
