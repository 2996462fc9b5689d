"""Scripts that people write in place of using a batch service."""
