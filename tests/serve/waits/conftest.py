"""How long clients of a server wait, so no other test may run beside: see the Makefile."""

from __future__ import annotations

from tests.serve.stories_fixtures import client, http, model, server

__all__ = ["client", "http", "model", "server"]  # fixtures
