"""Runs the real pipeline, loops and SQLite store on virtual time, from a seed, with kills between any two awaits."""
