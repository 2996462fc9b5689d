"""How many requests one upstream gets at once and how fast, found out while they run.

`limiter.py` is what the dispatcher talks to. `load.py` counts what is in flight. `concurrency.py` finds by throughput
how many the upstream should have in flight, from the measurements of `rounds.py`. For each model that was refused
something, `model.py` holds back its starts: by number (`ceiling.py`), by rate (`rate.py`) and by what the upstream
announces in its headers (`announced.py`).
"""

from batchline.pipeline.dispatch.limiter.limiter import Limiter
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.sign import Sign

__all__ = ["Limiter", "Sign", "Start"]
