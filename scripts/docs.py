"""Build the pages as a site into build/docs.

    python scripts/docs.py                  build
    python scripts/docs.py --serve 8010     build, then serve on 127.0.0.1:8010 until Ctrl-C

A warning is an error: a broken link or anchor, a page that is not in the sidebar (docs/conf.py),
code that is not what its fence says. The site needs no other host, so it can also be opened as
files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "docs"
CACHE = ROOT / "build" / "docs-cache"
FIRST_PAGE = "docs/index.html"
STRICT = ("-W", "--keep-going", "-n")


def build(site: Path = SITE, cache: Path = CACHE) -> int:
    """Build the site; returns Sphinx's exit status."""
    command = [sys.executable, "-m", "sphinx", "-q", *STRICT, "-b", "html"]
    places = ["-c", str(ROOT / "docs"), "-d", str(cache), str(ROOT), str(site)]
    status = subprocess.run([*command, *places], cwd=ROOT).returncode
    if status == 0:
        forward = f'<meta http-equiv="refresh" content="0; url={FIRST_PAGE}">'
        (site / "index.html").write_text(f"<!doctype html><title>cfg-serve</title>{forward}\n")
    return status


def serve(port: int, site: Path = SITE) -> None:
    """Serve the site on the loopback address until Ctrl-C."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    try:
        listening = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        sys.exit(f"cannot listen on port {port} ({error}). Use another: make docs DOCS_PORT=8012")
    with listening as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the pages as a site into build/docs.")
    parser.add_argument("--serve", type=int, metavar="PORT", help="then serve it on 127.0.0.1")
    port = parser.parse_args().serve
    if status := build():
        return status
    print(f"built {SITE.relative_to(ROOT) / FIRST_PAGE}")
    if port is not None:
        serve(port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
