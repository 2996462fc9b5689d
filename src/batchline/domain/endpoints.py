"""The paths of the endpoints that lines of batches and synchronous calls name."""

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
SYNC_ONLY = (RESPONSES, "/summary", "/usecase/classify/iab", "/gliner")
"""Endpoints of synchronous calls that lines of a batch can never use (E2)."""
