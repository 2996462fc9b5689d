"""Measures batchline and its alternatives. See README.md in this folder."""
