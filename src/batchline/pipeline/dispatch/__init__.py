"""Sends the lines of claimed shards to one upstream, and ends each of them.

`dispatcher.py` has the steps. Its parts are the other modules: `queues.py` (ready, and waiting for a retry),
`in_flight.py`, `attempts.py`, `completion.py` (how a line ends or moves to another upstream), `demand.py` (how many
more to claim), `circuit_breaker.py` (an upstream that is unavailable), `quarantine.py` (a line that crashes it) and
`limiter/` (how many at once, and how fast).
"""
