"""Fuzzers of what strangers and upstreams send: bytes that nobody thought of, from a corpus that is kept."""
