"""How many requests one upstream gets at once and how fast, found out while they run.

`limiter.py` is what the dispatcher talks to. `load.py` counts what is in flight. `concurrency.py` finds by throughput
how many the upstream should have in flight, from the measurements of `rounds.py`; `overload.py` lowers that number if
requests time out. For each model, `model.py` holds back starts: by what the upstream announces in its headers
(`announced.py`) and by what it refuses (`refusals.py`, with `sample.py` and `slots.py`), unless the refusals are about
single lines (`line_refusals.py`).
"""

from batchline.pipeline.dispatch.limiter.limiter import Limiter
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.sign import Sign

__all__ = ["Limiter", "Sign", "Start"]
