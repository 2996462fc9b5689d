"""Finds how many requests an upstream gets at once, and how fast, from its answers and without any setting."""

from batchline.pipeline.dispatch.limiter.limiter import Limiter, Sign
from batchline.pipeline.dispatch.limiter.throughput import Start

__all__ = ["Limiter", "Sign", "Start"]
