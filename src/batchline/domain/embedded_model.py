"""The names of the embedded model. This module imports nothing, because the model's process imports it."""

EMBEDDED_MODEL = "smollm2-135m-instruct"
ANY_MODEL = "any"
"""A name that the embedded model answers to as well, for requests that do not care which model answers."""
