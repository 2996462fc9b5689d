"""Runs a table: each row becomes a request by a template, and the answers are joined to the rows."""
