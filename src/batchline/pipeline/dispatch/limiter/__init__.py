"""How many requests an upstream gets at once, and how fast: found out from its answers, with nothing to set."""

from batchline.pipeline.dispatch.limiter.limiter import Limiter, Sign
from batchline.pipeline.dispatch.limiter.throughput import Start

__all__ = ["Limiter", "Sign", "Start"]
