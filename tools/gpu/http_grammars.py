"""Grammars and tools over HTTP, plain and guided, on a server as `make serve` starts it.

    python -m tools.gpu.http_grammars [--cpu]

Each request is sent twice: a grammar is compiled at its first use. Tells the status and the seconds
of both. Prints a table and a line of JSON, and fails if an answer is not 200.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import Report, parser
from models.real_size import real_size_model
from tools.serving.process import ServeProcess, shipped_config

NAME = "served"
LIMIT_S = 120
MESSAGES = [{"role": "user", "content": "Name a city and how many people live there."}]
GUIDED = {"guidance_scale": 1.5, "negative_prompt": "You answer in one word."}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "people": {"type": "integer"}},
    "required": ["city", "people"],
}


def tool(place: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"city_{place}", "parameters": SCHEMA}}


def asked() -> dict[str, dict[str, Any]]:
    """The fields of each request, beside its messages."""
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    return {
        "text": {},
        "json_object": {"response_format": {"type": "json_object"}},
        "schema": {"response_format": schema},
        "regex": {"structured_outputs": {"regex": "[a-z ]*"}},
        "choice": {"structured_outputs": {"choice": ["Oslo", "Rome"]}},
        "tools, auto": {"tools": [tool(0)], "tool_choice": "auto"},
        "tools, required": {"tools": [tool(0)], "tool_choice": "required"},
        "60 tools, auto": {"tools": [tool(n) for n in range(60)], "tool_choice": "auto"},
    }


def configuration(cpu: bool) -> dict[str, Any]:
    """configs/cfg.yaml with a model of real size, and what its comments say of a GPU."""
    config: dict[str, Any] = shipped_config("cfg")
    (application,) = config["applications"]
    args = application["args"]
    args.pop("fallback", None)
    args.pop("encoders", None)
    args |= {"model": str(real_size_model()), "served_model_name": NAME}
    named = {entry["name"]: entry for entry in application["deployments"]}
    application["deployments"] = [named["CfgRouter"], named["ModelReplica"]]
    if not cpu:
        args["engine"] = {"max_model_len": 16_384, "max_num_seqs": 256}
        named["ModelReplica"]["ray_actor_options"] = {"num_cpus": 1, "num_gpus": 1}
    return config


def answers(url: str) -> Iterator[dict[str, Any]]:
    """One row for each request, plain and guided."""
    for name, fields in asked().items():
        for kind, guidance in (("plain", {}), ("guided", GUIDED)):
            body = {"model": NAME, "messages": MESSAGES, "max_tokens": 48, "temperature": 0.0}
            row: dict[str, Any] = {"request": name, "kind": kind, "status": [], "seconds": []}
            for _ in range(2):
                began = time.monotonic()
                answer = httpx.post(
                    f"{url}/v1/chat/completions",
                    json={**body, **fields, **guidance},
                    timeout=LIMIT_S,
                )
                row["status"].append(answer.status_code)
                row["seconds"].append(round(time.monotonic() - began, 3))
            if answer.status_code != 200:
                row["error"] = answer.text[:300]
            yield row


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cpu", action="store_true", help="with the YAML's sizes for a CPU")
    args = options.parse_args()
    report = Report("http grammars", args)
    rows = []
    config = configuration(args.cpu)
    with ServeProcess(config) as server:
        started = time.monotonic() - server.started
        for row in answers(server.url):
            rows.append(row)
            report.row(*row.values())
    bad = [row for row in rows if set(row["status"]) != {200}]
    first, second = (max(row["seconds"][use] for row in rows) for use in (0, 1))
    report.end(
        headline=f"{len(rows) - len(bad)} of {len(rows)} requests answered; slowest first use"
        f" {first:.1f} s, second {second:.1f} s",
        model=Path(config["applications"][0]["args"]["model"]).name,
        start_s=round(started, 1),
        rows=rows,
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
