"""Render the KubeRay manifest of a Serve configuration.

    python scripts/kuberay.py configs/llama-8b-tp2.yaml --image cfg-serve:VERSION --gated >
    deploy/kuberay/rayservice.yaml

The configuration goes into the manifest word for word. The GPUs of a pod, the number of pods and
the time that they may take to stop are computed from it. The environment variables come from
configs/serve.env, the version of Ray from the newest list for CUDA in requirements/, and everything
else from deploy/kuberay/rayservice.template.yaml.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml
from lists import REQUIREMENTS, newest

from cfg_serve.home import serve_settings

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "deploy" / "kuberay" / "rayservice.template.yaml"
FILE = TEMPLATE.with_name("rayservice.yaml")
SHOWN, IMAGE = ROOT / "configs" / "llama-8b-tp2.yaml", "cfg-serve:VERSION"
"""What FILE has; `make pages` writes it."""

CPUS_PER_GPU, MEMORY_GIB_PER_GPU = 4, 32
"""Resources of a GPU pod for each of its GPUs. Enough for 8B models; a first guess for others."""

SERVE_DEFAULT_DRAIN_S = 20
"""Serve's default for graceful_shutdown_timeout_s, in seconds."""

SUCCESSOR_S = 10
"""Seconds that the replicas of a pod that ends wait for their successors in other pods."""

RAY_MARGIN_S = 30
"""Seconds that a pod gets after its last stream, so that Ray can leave the cluster."""


class RenderError(Exception):
    """The configuration cannot run on Kubernetes as it is. The message says what to do."""


def shown() -> str:
    """The manifest that the repository has."""
    return render(SHOWN, IMAGE, gated=True)


def render(path: Path, image: str, gpus_per_pod: int | None = None, gated: bool = False) -> str:
    """The manifest as text. Raises RenderError.

    gpus_per_pod: None takes the GPUs of the largest replica.
    gated: no pod starts without the Secret that has the model's token. Else an engine would find
    out after minutes.
    """
    text = path.read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text)
    check_http(config)
    (application,) = config["applications"]
    deployments = application["deployments"]
    gpus = gpus_per_pod or gpus_of_a_pod(deployments)
    drain_s = max(
        math.ceil(d.get("graceful_shutdown_timeout_s", SERVE_DEFAULT_DRAIN_S)) for d in deployments
    )
    low, high = pods(deployments, gpus)
    values = {
        "config": (
            path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path.name
        ),
        "image": image,
        "gated": " --gated" if gated else "",
        "token_note": "pods do not start without it" if gated else "gated models only",
        "token_optional": "false" if gated else "true",
        "serve_env": serve_env(),
        "serve_config": textwrap.indent(text.rstrip(), "    "),
        "ray_version": pinned_ray(),
        "port": config["http_options"]["port"],
        "gpus": gpus,
        "gpu_cpus": gpus * CPUS_PER_GPU,
        "gpu_memory": gpus * MEMORY_GIB_PER_GPU,
        "min_pods": low,
        "max_pods": high,
        "drain_s": drain_s,
        "node_drain_s": drain_s + SUCCESSOR_S,
        "grace_s": drain_s + RAY_MARGIN_S,
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)


def serve_env() -> str:
    """configs/serve.env as entries of a container's `env`."""
    entries = (f'- {{name: {name}, value: "{value}"}}' for name, value in serve_settings().items())
    return textwrap.indent("\n".join(entries), " " * 12)


def check_http(config: Mapping[str, Any]) -> None:
    """Raise RenderError if other pods could not reach Serve's proxies, or a pod had no proxy."""
    host = config["http_options"].get("host")
    if host not in ("0.0.0.0", "::"):
        raise RenderError(
            f"http_options.host is {host}, which no other pod can reach: set 0.0.0.0."
        )
    if config.get("proxy_location", "EveryNode") != "EveryNode":
        raise RenderError(
            "the service sends requests to every pod with a replica: set proxy_location: EveryNode."
        )


def gpus_of_a_pod(deployments: list[dict[str, Any]]) -> int:
    """The smallest number of GPUs that holds any one replica.

    Raises RenderError if a replica may span several pods, because the user must then give the
    number. Raises RenderError, too, if no replica needs a GPU.
    """
    for deployment in deployments:
        if gpus_of(deployment) > 1 and deployment.get("placement_group_strategy") != "STRICT_PACK":
            name = deployment["name"]
            raise RenderError(
                f"a replica of {name} may span several pods: give --gpus-per-pod, or set"
                " placement_group_strategy: STRICT_PACK."
            )
    most = max(gpus_of(deployment) for deployment in deployments)
    if not most:
        raise RenderError(
            "no deployment asks for a GPU, but the manifest is for GPU pods: use another config."
        )
    return math.ceil(most)


def gpus_of(deployment: Mapping[str, Any]) -> float:
    """GPUs of one replica, including those of its workers."""
    if bundles := deployment.get("placement_group_bundles"):
        return float(sum(bundle.get("GPU", 0) for bundle in bundles))
    return float(deployment.get("ray_actor_options", {}).get("num_gpus", 0))


def pods(deployments: list[dict[str, Any]], gpus_per_pod: int) -> tuple[int, int]:
    """The fewest and the most GPU pods that Serve can ask for."""
    low = high = 0.0
    for deployment in deployments:
        scaling = deployment.get("autoscaling_config", {})
        fixed = deployment.get("num_replicas", 1)
        low += gpus_of(deployment) * (scaling.get("min_replicas", 1) if scaling else fixed)
        high += gpus_of(deployment) * (scaling.get("max_replicas", 1) if scaling else fixed)
    return math.ceil(low / gpus_per_pod), math.ceil(high / gpus_per_pod)


def pinned_ray() -> str:
    """The version of Ray in the image. All runtime lists pin the same one."""
    pins = (REQUIREMENTS / f"{newest('cuda')}.txt").read_text(encoding="utf-8")
    found = re.search(r"^ray==(\S+)", pins, re.M)
    assert found, "the lists pin ray"
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Render the KubeRay manifest of a Serve configuration."
    )
    parser.add_argument("config", type=Path, help="a file like those in configs/")
    parser.add_argument(
        "--image", required=True, help="name and version of the image from deploy/Containerfile"
    )
    parser.add_argument(
        "--gpus-per-pod", type=int, help="GPUs of each GPU pod (default: those of one replica)"
    )
    parser.add_argument(
        "--gated", action="store_true", help="no pod starts without the token of the model's hub"
    )
    args = parser.parse_args()
    try:
        sys.stdout.write(render(args.config, args.image, args.gpus_per_pod, args.gated))
    except RenderError as error:
        print(f"kuberay: {args.config}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
