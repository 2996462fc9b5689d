"""A zoo of upstreams: how near the limiter comes to a client that knows each of them, in virtual time.

`upstreams.py` has the kinds of upstreams, and `cases.py` those that the limiter is tested with, with their goals.
`dispatcher.py` sends lines to them as the dispatcher does. ``python -m tests.support.zoo`` prints a table. `bench/zoo`
does the same with real processes and in real time.
"""
