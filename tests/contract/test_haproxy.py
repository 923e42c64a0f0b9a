"""start/haproxy.sh: HAProxy's own ports are closed to other machines, and the server's is not."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from ray.serve._private import haproxy_templates

PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": "9101", "RAY_SERVE_HAPROXY_STATS_PORT": "8404"}
SCRIPT = Path(__file__).resolve().parents[2] / "cfg_serve" / "start" / "haproxy.sh"
TEMPLATES = [value for name, value in vars(haproxy_templates).items() if name.endswith("TEMPLATE")]


def bound(text: str, folder: Path) -> list[str]:
    """The addresses that HAProxy would listen on with the configuration `text`."""
    config = folder / "haproxy.cfg"
    config.write_text(text)
    ran = subprocess.run(
        [SCRIPT, "-db", "-f", config, "-sf", "1"],
        env={**os.environ, "CFG_SERVE_HAPROXY": "/bin/echo", **PORTS},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout.split() == ["-db", "-f", str(config), "-sf", "1"]
    return re.findall(r"^ *bind (\S+)", config.read_text(), re.MULTILINE)


def test_ports_are_on_the_loopback_address(tmp_path: Path) -> None:
    text = (
        "frontend a\n    bind :9101\nfrontend b\n    bind 10.0.0.7:8000\nlisten s\n  bind *:8404\n"
    )
    assert bound(text, tmp_path) == ["127.0.0.1:9101", "10.0.0.7:8000", "127.0.0.1:8404"]


def test_the_server_is_where_it_was(tmp_path: Path) -> None:
    """For HOST=0.0.0.0, Ray writes `*`."""
    assert bound("frontend b\n    bind *:8000\n    bind *:91010\n", tmp_path) == [
        "*:8000",
        "*:91010",
    ]


def test_the_ports_of_rays_configuration(tmp_path: Path) -> None:
    """Ray's templates open no other port, and none that the script does not see."""
    text = re.sub(r"#.*", "", "\n".join(TEMPLATES))
    for name, port in (("config.metrics_port", "9101"), ("config.stats_port", "8404")):
        text = text.replace(f"{{{{ {name} }}}}", port)
    assert len(re.findall("bind ", text)) == 4
    hosts = [address.split(":")[0] for address in bound(text, tmp_path)]
    assert hosts.count("127.0.0.1") == 2, hosts


def test_a_head_has_a_deadline(tmp_path: Path) -> None:
    """Once, among the defaults, which Ray's configuration leaves without one."""
    assert any(re.search(r"timeout client ", template) for template in TEMPLATES)
    text = "defaults\n    timeout client 3600s\nbackend b\n    timeout client 5s\n"
    bound(text, tmp_path)
    lines = (tmp_path / "haproxy.cfg").read_text().splitlines()
    assert lines[1:3] == ["    timeout client 3600s", "    timeout http-request 10s"]
    assert lines[3:] == ["backend b", "    timeout client 5s"]
