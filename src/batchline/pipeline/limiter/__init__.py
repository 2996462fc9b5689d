"""How many requests an upstream gets at once, and how fast: found out from its answers, with nothing to set."""

from batchline.pipeline.limiter.flow import Start
from batchline.pipeline.limiter.limiter import Limiter, Sign

__all__ = ["Limiter", "Sign", "Start"]
