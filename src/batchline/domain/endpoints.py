"""The path of chat completions, which lines of batches and synchronous calls name."""

CHAT = "/v1/chat/completions"
