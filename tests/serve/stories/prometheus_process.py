"""A real Prometheus as a child process, which scrapes given addresses once a second."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import yaml

from tools.serving.process import free_port

START_LIMIT_S = 60


def missing() -> str | None:
    """Return what is not on the PATH of Debian's package `prometheus`; None if all is there."""
    gone = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"{' and '.join(gone)} of the Debian package prometheus" if gone else None


class PrometheusProcess:
    """Prometheus on a free port of the loopback address.

    targets: addresses to scrape, such as 127.0.0.1:8000, by the name of the job.
    """

    def __init__(self, targets: Mapping[str, Sequence[str]]) -> None:
        self._dir = Path(tempfile.mkdtemp(prefix="prometheus"))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in targets.items()
            ],
        }
        (self._dir / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        with (self._dir / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._dir / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._dir / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> PrometheusProcess:
        """Return when Prometheus answers."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/-/ready").status_code == 200:
                    return self
            time.sleep(0.2)
        told = (self._dir / "log").read_text(errors="replace")
        self.kill()
        raise AssertionError(f"prometheus did not get ready:\n{told[-2000:]}")

    def __exit__(self, *_: object) -> None:
        self.kill()

    def values(self, expr: str) -> list[float]:
        """The present values of an expression, one for each of its series."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=30)
        assert answer.status_code == 200, answer.text
        return [float(series["value"][1]) for series in answer.json()["data"]["result"]]

    def kill(self) -> None:
        """End it, and remove its files."""
        self._process.kill()
        self._process.wait(timeout=10)
        shutil.rmtree(self._dir, ignore_errors=True)
