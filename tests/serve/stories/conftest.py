"""Answers of one server: see stories_fixtures.py."""

from __future__ import annotations

from tests.serve.stories_fixtures import client, http, model, server

__all__ = ["client", "http", "model", "server"]  # fixtures
