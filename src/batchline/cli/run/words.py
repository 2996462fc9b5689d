"""Numbers, times and other people's texts as they are shown."""

_WIDEST = 200


def amount(number: int) -> str:
    return f"{number:,}"


def duration(seconds: float) -> str:
    """``3.4 s`` while that says something, then ``5:07`` and ``1:05:07``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """What comes from a server or an input file must not steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str) -> str:
    shown = printable(text[:_WIDEST])
    return shown if len(text) <= _WIDEST else f"{shown}..."
