"""Says what people read about lines that failed: what to do by their code (D2), and the plain message."""

_REMEDIES = {
    "authentication_error": "Check the API key of the upstream, or the key of the batch if it was revoked.",
    "batch_cancelled": "These lines never ran, because the batch was cancelled. Rerun them if you still need them.",
    "batch_expired": "These lines did not start within the completion window. Rerun them.",
    "context_length_exceeded": "Shorten the input, lower max_tokens, or choose a model that takes more tokens, with "
    "{patch}.",
    "insufficient_quota": "No money is left, here or at the upstream's provider. Add funds, then rerun the lines.",
    "internal_error": "The upstream failed on these lines again and again; look into its log, and rerun them when it "
    "is well.",
    "invalid_request_error": "The upstream refuses these requests; read the sample, and correct the field that it "
    "names with {patch}.",
    "not_found_error": "The model does not exist here, or the project may not use it. Choose another one with {patch}.",
    "rate_limit_exceeded": "The upstream refused these lines for too long. Rerun them later.",
    "request_too_large": "These requests are too large for the upstream; shorten them.",
}
_OTHER_REMEDY = "Read the sample, correct its cause, and rerun the failed lines."


def remedy_for(code: str, *, patch: str = "a patch of the rerun") -> str:
    """Return what a person can do about lines that failed with a code, in one or two sentences.

    ``patch`` says how the person changes the requests of the rerun.
    """
    return _REMEDIES.get(code, _OTHER_REMEDY).format(patch=patch)


def without_legacy(message: str) -> str:
    """Return the message of a failed line without the legacy code in front of it, which only programs use."""
    return message.partition("] ")[2] if message.startswith("[legacy:") else message
