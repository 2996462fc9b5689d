"""Measures batchline against what one would use instead. See README.md in this folder."""
