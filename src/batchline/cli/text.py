"""Writes numbers, sizes and times as people read them, and makes the text of strangers harmless for a terminal."""

_MAX_TEXT_LENGTH = 200
_SIZE_UNITS = ("KB", "MB", "GB", "TB")
_AGE_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"))


def printable(text: str) -> str:
    """Escape what is not printable: text from a client, a server or a file must not control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str, *, length: int = _MAX_TEXT_LENGTH) -> str:
    """Return the beginning of a text, with what is not printable escaped."""
    shown = printable(text[:length])
    return shown if len(text) <= length else f"{shown}..."


def without_legacy(message: str) -> str:
    """Return the message of a failed line without the legacy code in front of it, which only programs use."""
    return message.partition("] ")[2] if message.startswith("[legacy:") else message


def format_count(number: int) -> str:
    """Return a number with separators between thousands."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 line``, ``2 lines``."""
    return f"{format_count(number)} {noun if number == 1 else noun + 's'}"


def format_size(size: int) -> str:
    """Return a number of bytes in the unit that fits: ``1 byte``, ``12.3 KB``, ``100 MB``."""
    if size < 1000:
        return counted(size, "byte")
    power = 1
    while power < len(_SIZE_UNITS) and size / 1000**power >= 999.5:
        power += 1
    return f"{size / 1000**power:.3g} {_SIZE_UNITS[power - 1]}"


def format_rate(per_second: float) -> str:
    """Return a rate of lines with few digits: ``0.25/s``, ``3.1/s``, ``1,250/s``."""
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.2g}/s" if per_second < 1 else f"{per_second:.1f}/s"


def format_duration(seconds: float) -> str:
    """Return ``3.4 s`` below ten seconds, then ``5:07`` and ``1:05:07``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit: ``12s``, ``5m``, ``3h``, ``2d``."""
    for size, unit in _AGE_UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"
