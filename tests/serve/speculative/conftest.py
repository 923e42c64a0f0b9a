"""One server for this folder: configs/cfg-speculative.yaml, with traces and logs in JSON.

It runs with Serve's own settings and without Ray's token, as plain `serve run` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.speculative.collector import Collector
from tools.serving.process import ServeProcess, shipped_config


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="package")
def server(collector: Collector) -> Iterator[ServeProcess]:
    config = shipped_config("cfg-speculative")
    config["logging_config"] = {"encoding": "JSON", "log_level": "INFO"}
    application = config["applications"][0]
    application["args"]["tracing"] = {"otlp_traces_endpoint": collector.endpoint}
    deployments = {one["name"]: one for one in application["deployments"]}
    environment = deployments["ModelReplica"]["ray_actor_options"]["runtime_env"]["env_vars"]
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    with ServeProcess(config, stock=True) as process:
        yield process
