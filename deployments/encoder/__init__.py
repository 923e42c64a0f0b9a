"""Embedder: a Serve replica that owns one prefill-only engine."""
