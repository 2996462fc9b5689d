"""A small client of the API, for commands that use a running server."""
