"""The error of tables and templates that cannot be used."""


class RowsFault(ValueError):
    """A table or a template cannot be used. ``text`` says why, and ``line`` where in the table, if that is known.

    The message of the error is ``text`` behind ``place``, such as ``rows.csv, line 3``.
    """

    def __init__(self, text: str, *, place: str = "", line: int | None = None) -> None:
        super().__init__(f"{place}: {text}" if place else text)
        self.text, self.line = text, line
