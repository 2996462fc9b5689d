"""How near batchline comes to an all-knowing client on upstreams of many kinds, in real time: ``make zoo``.

`tests/support/zoo` does the same in virtual time, with the limiter alone.
"""
