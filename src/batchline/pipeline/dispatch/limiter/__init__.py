"""Finds, while requests run, how many of them one upstream should get at once, and how fast.

The dispatcher calls `limiter.py`. `load.py` counts the requests in flight. `concurrency.py` finds by throughput how
many the upstream should have in flight, from the measurements of `rounds.py`: `ramp.py` finds a first number, and
`probe.py` compares it with others near it. `latencies.py` remembers how long requests took, `expected.py` notices that
the upstream has changed, `noise.py` knows how much rounds differ by themselves, and `reported_queue.py` judges what an
engine says of its queue. `overload.py` lowers the number if requests time out. For each model, `model.py` holds back
starts: by the limits that the upstream announces in its headers (`announced.py`) as long as these prove true
(`checks.py`) and are those of one server (`rises.py`), and by its refusals (`refusals.py`, with `sample.py`,
`slots.py`, `block.py` and `probe_rests.py`), unless these are about single lines (`line_refusals.py`) or about one
project (`project_refusals.py`).
"""

from batchline.pipeline.dispatch.limiter.limiter import Limiter
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.sign import Sign

__all__ = ["Limiter", "Sign", "Start"]
