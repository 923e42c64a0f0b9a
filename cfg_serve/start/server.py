"""Serve a configuration on a Ray cluster of its own, in the foreground, until Ctrl-C.

Ray's own ports are on the loopback address, and a token made for this run guards them. Ray keeps
its files in a temporary folder and has no dashboard. The log is kept. On Ctrl-C, on SIGTERM and
after an error, this process ends every process below it before it exits. It adopts orphans
(PR_SET_CHILD_SUBREAPER), so that the sweep at the end finds all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from cfg_serve import home
from cfg_serve.check.file import deployment_of, generators_of, problems_of
from cfg_serve.errors import CommandError
from cfg_serve.generate.model_facts import refusals
from cfg_serve.machine import this_machine
from cfg_serve.start import causes, examples, preflight, processes, status
from cfg_serve.start.environment import LOOPBACK, environment

START_TIMEOUT_S = 1800.0  # the first download of a large model is slow; the log shows it
TELL_EVERY_S = 15.0
LOOK_S = 0.5
INGRESS_PATIENCE_S = 20.0
"""How long an ingress may take to hear of all replicas from Serve, once they answer."""

_REPLICAS = re.compile(r"^cfg_serve_replicas{.*} (\S+)$", re.MULTILINE)
T0 = time.monotonic()


class Stopped(BaseException):
    """The user pressed Ctrl-C, SIGTERM arrived, or the terminal was closed.

    No Exception, so that what never fails does not keep the server from stopping.
    """


@dataclass(frozen=True)
class Plan:
    """What is served. name: of the file or the model. config: with host and port in it."""

    name: str
    config: dict[str, Any]
    haproxy: bool = False

    @property
    def host(self) -> str:
        return str(self.config["http_options"]["host"])

    @property
    def port(self) -> int:
        return int(self.config["http_options"]["port"])

    @property
    def url(self) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"


def say(text: str) -> None:
    print(f"[serve {time.monotonic() - T0:4.0f} s] {text}", flush=True)


def run(plan: Plan) -> int:
    """Serve until Ctrl-C; returns 0 then. Raises CommandError if it cannot, or ends by itself."""
    check(plan)
    for sig in processes.STOP_SIGNALS:
        signal.signal(sig, _stopped)
    folder = Path(tempfile.mkdtemp(prefix="cfg-serve-"))
    try:
        _serve(plan, folder, home.new_log())
    except Stopped:
        say("stopped")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def check(plan: Plan, *, with_ray: bool = False) -> None:
    """Raise CommandError for all that can be known before Ray starts.

    with_ray: Ray checks the values of its own options here, which takes a second. When a server
    starts, the child does it.
    """
    found = [problem.said for problem in problems_of(plan.config)]
    if with_ray and not found:
        found = ray_refusals(plan.config)
    found = found or preflight.problems(plan.config, this_machine())
    if found := found or refusals(examples.model_names(plan.config)):
        raise CommandError("\n".join(f"{plan.name}: {sentence}" for sentence in found))
    preflight.check_port(plan.host, plan.port)


def ray_refusals(config: Mapping[str, Any]) -> list[str]:
    from cfg_serve.check import ray_values  # imports Ray

    return [problem.said for problem in ray_values.problems_of(config)]


def _serve(plan: Plan, folder: Path, log: Path) -> None:
    """Start everything and say when it is ready. Ends only with an exception."""
    derived, state = folder / "config.yaml", folder / "status.json"
    derived.write_text(yaml.safe_dump(plan.config, sort_keys=False))
    with log.open("ab") as sink, processes.no_process_left():
        say(f"starting Ray and loading {plan.name} (log: {log})")
        command = [sys.executable, "-m", "cfg_serve.start.child", str(derived), str(state)]
        child = processes.spawn(command, environment(folder, haproxy=plan.haproxy), sink.fileno())
        try:
            for sentence in examples.missing_models(plan.config):
                say(sentence)
            _wait(plan, child, state, log)
            _tell(plan)
            child.wait()
            raise _Failed("`serve run` ended by itself")
        except _Failed as error:
            time.sleep(1.0)  # until the rest of a traceback is in the log
            raise CommandError(_explained(str(error), plan, log)) from None
        finally:
            say("stopping")
            processes.stop(child, signal.SIGINT, 20)


class _Failed(Exception):
    """The server did not start, or ended. The log says why."""


def _wait(plan: Plan, child: subprocess.Popen[bytes], state: Path, log: Path) -> None:
    """Return when all configured replicas answer. Raises _Failed if they do not."""
    wanted, looks = preflight.wanted_replicas(plan.config), _Every(TELL_EVERY_S)
    while True:
        found = status.read(state)
        if found.refused:
            raise CommandError("\n".join(f"{plan.name}: {x}" for x in found.refused))
        if found.is_running and _answers(f"{plan.url}/ready"):
            break
        if child.poll() is not None or found.failure or causes.FAILED.search(_text(log)):
            raise _Failed("the server did not start")
        if time.monotonic() - T0 > START_TIMEOUT_S:
            raise _Failed(f"the server was not ready after {START_TIMEOUT_S:.0f} s")
        if looks.is_due():
            say(f"  still loading: {_progress(found, wanted, log)}")
        time.sleep(LOOK_S)
    _wait_for_ingress(plan, wanted)


def _wait_for_ingress(plan: Plan, wanted: dict[str, int]) -> None:
    """Wait until the ingress has heard of all replicas, where it may be asked and there is one."""
    replicas = sum(wanted.get(name, 0) for name in _generators(plan.config))
    if replicas > 1 and wanted["CfgRouter"] == 1 and not examples.has_keys(plan.config):
        processes.wait_for(lambda: _replicas(plan.url) >= replicas, INGRESS_PATIENCE_S)


def _generators(config: dict[str, Any]) -> list[str]:
    """The names of the generators' deployments."""
    entries = [entry for args in examples.arguments(config) for entry in generators_of(args)]
    return [deployment_of(entry) for entry in entries]


def _replicas(url: str) -> int:
    """The replicas of the generators that the ingress knows."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=10) as told:
        return sum(int(float(found)) for found in _REPLICAS.findall(told.read().decode()))
    return 0


def _progress(found: status.Status, wanted: dict[str, int], log: Path) -> str:
    if lacking := causes.lacking(_text(log)):
        return f"no machine here has {lacking}"
    return found.progress(wanted) or "Ray is starting"


def _tell(plan: Plan) -> None:
    if not examples.has_keys(plan.config) and (names := examples.served(plan.url)):
        say(f"serving {names}")
    say(f"ready on {plan.url}; Ctrl-C stops it.")
    line = examples.example(plan.url, plan.config)
    say(f"for the commands of the pages: export CFG_SERVE_URL={plan.url}")
    say(f"playground: {plan.url}/playground. Or try:\n\n{line}\n")


def _explained(what: str, plan: Plan, log: Path) -> str:
    text = _text(log)
    if found := causes.cause(text):
        several = len(_generators(plan.config)) > 1
        whose = f" ({found.deployment})" if several and found.deployment else ""
        return f"{what}{whose}: {found}\n\nThe whole log: {log}"
    return f"{what}. The end of its log, {log}:\n\n{causes.last_lines(text)}"


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def _stopped(signum: int, frame: FrameType | None) -> None:
    """Says so at once: what is below may take seconds to end."""
    os.write(1, f"\n[serve] {signal.Signals(signum).name}: stopping all processes\n".encode())
    raise Stopped


class _Every:
    """Says once in a while that it is time to tell something."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._told = seconds, time.monotonic()

    def is_due(self) -> bool:
        if time.monotonic() - self._told < self._seconds:
            return False
        self._told = time.monotonic()
        return True
