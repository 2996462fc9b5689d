"""Repeats known attacks on a running service, and shows what they do."""
