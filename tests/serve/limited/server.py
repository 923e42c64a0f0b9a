"""A server with little room, keys, a LoRA adapter, and a logits processor that fails."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from tests.engine.adapters import make_adapter
from tests.support.quick_starts import python_path
from tools.serving.process import REPOSITORY, Json, ServeProcess, grammars_later, shipped_config

KEY = "some-key"
"""A key without limits."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def limited_server(folder: Path) -> ServeProcess:
    """Serve with 24 KV blocks of 32 tokens, two streams at a time, and two queued streams.

    folder: where to write the adapter.
    """
    adapter = make_adapter(REPOSITORY / "models" / "stories", folder / "adapter")
    config = shipped_config()
    config["applications"][0]["args"] |= {
        "engine": config["applications"][0]["args"]["engine"]
        | {
            "block_size": 32,
            "num_gpu_blocks_override": 24,
            "max_num_seqs": 4,
            "enable_lora": True,
            "max_lora_rank": 8,
        },
        "frontend": {
            "lora_modules": [{"name": "odd-stories", "path": str(adapter)}],
            "enable_per_request_metrics": True,
            "enable_force_include_usage": True,
        },
        "logits_processors": {"breaks": "faulty_processors:Breaks"},
        "admission": {"streams_per_replica": 2, "max_queued_streams": 2},
        "access": {"max_body_bytes": 4096, "keys": keys()},
    }
    environment = {"PYTHONPATH": python_path(Path(__file__).parent), "USUAL_KEY": KEY}
    return ServeProcess(grammars_later(config), environment)


def keys() -> list[Json]:
    return [
        {"name": "usual", "env": "USUAL_KEY"},
        {"name": "encoders-only", "sha256": digest("other"), "models": ["all-MiniLM-L6-v2"]},
        {"name": "generator-only", "sha256": digest("gen"), "models": ["stories"]},
        {"name": "operator", "sha256": digest("op"), "may_load_adapters": True},
        {"name": "slow", "sha256": digest("slow"), "requests_per_minute": 1, "min_priority": 5},
    ]


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()
