"""Attacks on a running server, beside watchers who know the right answers: see __main__.py."""
