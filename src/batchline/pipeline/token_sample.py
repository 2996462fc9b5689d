"""Counts the tokens of a few lines of an input with the tokenizers of their upstreams, to estimate those of all (G5).

A check must stay cheap for an upstream that is busy. So it asks for a few lines of a few models, a few at a time, and
for a short time. Without an answer the estimate by size is used.
"""

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct

from batchline.domain.chat import with_upstream_name
from batchline.domain.estimates import request_tokens
from batchline.domain.models import Catalog, Model
from batchline.ports import ModelSurvey, Tokens

MAX_MODELS = 4
"""The number of models whose lines are counted: those with the most lines."""
_TIMEOUT_SECONDS = 5.0
"""The time for all lines of one model. A line takes a few milliseconds."""
_MAX_IN_FLIGHT = 4


class CountedTokens(Struct, frozen=True):
    """The input tokens of all lines of a model, and the number of its lines that a tokenizer counted."""

    tokens: int
    lines: int = 0


class TokenSampler:
    """Counts samples. ``tokens`` has the token counter of each upstream, by its name."""

    def __init__(self, *, tokens: Mapping[str, Tokens], catalog: Catalog) -> None:
        self._tokens, self._catalog = tokens, catalog

    async def count(self, surveys: Sequence[ModelSurvey], *, project_id: str) -> dict[str, CountedTokens]:
        """Return the input tokens of each model. If only some lines were counted, the others are estimated by these."""
        found = {survey.model: CountedTokens(survey.input_tokens) for survey in surveys}
        for survey in sorted(surveys, key=lambda survey: -survey.lines)[:MAX_MODELS]:
            model = self._catalog.find(survey.model, project_id) if survey.model else None
            if model is not None:
                counts = await self._count_sample(model, survey.sample)
                found[survey.model] = _estimate_tokens(survey, counts)
        return found

    async def _count_sample(self, model: Model, sample: Sequence[bytes]) -> dict[bytes, int]:
        """Return the tokens of those bodies that were counted."""
        tokens = next((self._tokens[name] for name in model.upstreams if name in self._tokens), None)
        counts: dict[bytes, int] = {}
        if tokens is None or not sample:
            return counts
        bodies = iter(sample)

        async def count_some() -> None:
            for body in bodies:
                count = await tokens.count_exactly(with_upstream_name(body, model))
                if count is None:
                    # The upstream cannot count, or is busy: it is asked nothing more.
                    return
                counts[body] = count

        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS), asyncio.TaskGroup() as group:
                for _ in range(min(_MAX_IN_FLIGHT, len(sample))):
                    group.create_task(count_some())
        except TimeoutError:
            pass
        return counts


def _estimate_tokens(survey: ModelSurvey, counts: Mapping[bytes, int]) -> CountedTokens:
    """Return the tokens of all lines, estimated by size and corrected by the lines that were counted."""
    if not counts:
        return CountedTokens(survey.input_tokens)
    counted = sum(counts[body] for body in survey.sample if body in counts)
    estimated = sum(request_tokens(body) for body in survey.sample if body in counts)
    lines = sum(body in counts for body in survey.sample)
    if lines == survey.lines:
        return CountedTokens(counted, lines)
    return CountedTokens(-(-survey.input_tokens * counted // estimated), lines)
