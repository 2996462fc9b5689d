"""Connects client commands with a server, or with a service on a data folder of this machine."""
