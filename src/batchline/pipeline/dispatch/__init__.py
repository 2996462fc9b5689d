"""Sends the lines of claimed shards to one upstream, and ends each of them.

`dispatcher.py` has the steps. Its parts are the other modules: `queues.py` (ready, and waiting for a retry),
`selection.py` (which of them start now), `funding.py` (what they may cost), `in_flight.py`, `attempts.py`,
`completion.py` (how a line ends or moves to another upstream), `demand.py` (how many more to claim), `waiting.py` (why
lines wait), `circuit_breaker.py` (an upstream that is unavailable), `quarantine.py` (a line that crashes it),
`resets.py` (a server that resets connections above its limit) and `limiter/` (how many at once, and how fast).
"""
