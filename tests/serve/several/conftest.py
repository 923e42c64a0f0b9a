"""One server for this folder: two generators and an encoder, after configs/two-models.yaml.

The models have different vocabularies, so tokens of the wrong engine would be noticed at once. The
second one is asleep at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine import tiny_models
from tools.serving.process import ServeProcess, grammars_later, shipped_config

STORIES, TINY, ENCODER = "stories", "tiny", "all-MiniLM-L6-v2"
CONTEXTS = {STORIES: 512, TINY: 256}


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("tiny") / TINY)


@pytest.fixture(scope="package")
def server(tiny_folder: Path) -> Iterator[ServeProcess]:
    config = shipped_config("two-models")
    (application,) = config["applications"]
    first, second = application["args"]["models"]
    first |= {"model": "models/stories", "fallback": None}
    first["engine"] |= {
        "max_model_len": CONTEXTS[STORIES],
        "dtype": "float32",
        "kv_cache_memory_bytes": 128 << 20,
    }
    second |= {"model": str(tiny_folder), "deployment": "Tiny", "max_followers": 2}
    second["engine"] |= {"max_model_len": CONTEXTS[TINY], "block_size": 32}
    application["args"]["encoders"][0]["engine"] = {"dtype": "float32"}
    tiny = next(part for part in application["deployments"] if part["name"] == "Stories")
    tiny["name"] = "Tiny"
    tiny["autoscaling_config"] |= {
        "downscale_delay_s": 20,
        "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }
    with ServeProcess(grammars_later(config)) as process:
        yield process


@pytest.fixture(scope="package")
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield http
