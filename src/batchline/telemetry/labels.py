"""Bounds the values of the label ``model``: clients may name any model where none is configured."""

from collections.abc import Callable

OTHER_MODEL = "other"
MAX_LEARNED_MODELS = 50
"""Models that get a label though they are not configured. Each makes about 25 series for every upstream."""


class ModelLabels:
    """The models that have a label: those that are configured, and the first ones that an upstream has answered for.

    A name that no upstream has answered for may be anything that a client sent. Its label is ``other``. ``on_learned``
    is called with each label that an answer added.
    """

    def __init__(self, *, on_learned: Callable[[str], None]) -> None:
        self._known = {OTHER_MODEL}
        self._room = MAX_LEARNED_MODELS
        self._on_learned = on_learned

    def add(self, model: str) -> None:
        """Give a configured model a label."""
        self._known.add(model)

    def of(self, model: str) -> str:
        """Return the label of a model."""
        return model if model in self._known else OTHER_MODEL

    def on_answer(self, model: str) -> str:
        """Note that an upstream answered for a model, and return its label."""
        if model not in self._known and self._room and model:
            self._room -= 1
            self._known.add(model)
            self._on_learned(model)
        return self.of(model)
