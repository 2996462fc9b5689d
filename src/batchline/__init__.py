"""batchline: OpenAI's Files and Batch API on your own machines."""

__version__ = "0.1.0"
