"""The other side of the API: a small client on the standard library, for commands that work against a server."""
