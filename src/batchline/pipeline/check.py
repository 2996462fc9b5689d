"""Checks an input file as a create would, and estimates the tokens, cost and time of its batch (G5).

Nothing is stored.
"""

from msgspec import Struct

from batchline.domain.endpoints import CHAT
from batchline.domain.errors import ObjectMissing
from batchline.domain.limits import InputLimits
from batchline.domain.models import DEFAULT_UPSTREAM, Catalog, Model
from batchline.domain.money import Tariff
from batchline.domain.records import InputFault, Owner
from batchline.domain.usage import Usage
from batchline.pipeline.create import (
    CreateRequest,
    FilesAndBatches,
    find_input_file,
    missing_object,
    require_metering,
    require_prices,
)
from batchline.pipeline.token_sample import CountedTokens, TokenSampler
from batchline.ports import ModelSurvey, Objects, StoreClock, Validator

_HISTORY_SECONDS = 7 * 86_400
_HISTORY_BATCHES = 5
"""The time is estimated from this number of the last batches of a model, not older than a week."""


class ModelCheck(Struct, frozen=True, kw_only=True):
    """The lines of one model."""

    survey: ModelSurvey
    input_tokens: int
    counted_lines: int
    """The number of lines that the model's own tokenizer counted. The tokens of the others are estimated."""
    enabled: bool
    cost_at_most: int | None
    """The most nano-units; None without metering, or if a line sets no limit for its output."""


class CheckReport(Struct, frozen=True, kw_only=True):
    """The faults that a create of this input would find, and the tokens, cost and time of its batch."""

    faults: list[InputFault]
    lines: int = 0
    models: list[ModelCheck] = []
    duplicates: int = 0
    seconds: tuple[int, int] | None = None
    """The least and the most time, by the last batches of the same models; None if there are none."""


class InputCheck:
    """Checks input files. ``answered_names`` are the names that the default upstream answers to; None if not known."""

    def __init__(
        self,
        *,
        store: FilesAndBatches,
        objects: Objects,
        validator: Validator,
        clock: StoreClock,
        limits: InputLimits,
        catalog: Catalog,
        tariff: Tariff,
        token_sampler: TokenSampler,
        answered_names: frozenset[str] | None,
    ) -> None:
        self._store, self._objects, self._validator, self._clock = store, objects, validator, clock
        self._limits, self._catalog, self._tariff = limits, catalog, tariff
        self._token_sampler, self._answered_names = token_sampler, answered_names

    async def check(self, owner: Owner, request: CreateRequest) -> CheckReport:
        """Check an input file. Raises NotFound, and InvalidRequest for a limit of the cost that cannot be held."""
        require_metering(request, self._tariff)
        file = await find_input_file(self._store, owner, request, at=int(self._clock.due()))
        try:
            async with self._objects.local(file.object_key) as source, self._objects.scratch() as work:
                verdict = await self._validator.validate(
                    project_id=owner.project_id,
                    source=source,
                    work=work,
                    endpoint=request.endpoint,
                    limits=self._limits,
                )
                if verdict.faults:
                    return CheckReport(faults=verdict.faults)
                survey = await self._validator.survey(project_id=owner.project_id, work=work, shards=verdict.shards)
        except ObjectMissing:
            raise missing_object(file) from None
        if request.max_cost is not None:
            require_prices({found.model for found in survey.models}, owner.project_id, self._catalog)
        counted: dict[str, CountedTokens] = {}
        if request.endpoint == CHAT:
            counted = await self._token_sampler.count(survey.models, project_id=owner.project_id)
        return CheckReport(
            faults=[],
            lines=verdict.lines,
            models=[self._check_model(owner, found, counted.get(found.model)) for found in survey.models],
            duplicates=survey.duplicates,
            seconds=await self._estimate_seconds(owner, survey.models),
        )

    def _check_model(self, owner: Owner, survey: ModelSurvey, counted: CountedTokens | None) -> ModelCheck:
        counted = counted or CountedTokens(survey.input_tokens)
        model = self._catalog.find(survey.model, owner.project_id) if survey.model else None
        cost = None
        if model is not None and self._tariff.metered and survey.output_tokens_at_most is not None:
            usage = Usage(input_tokens=counted.tokens, output_tokens=survey.output_tokens_at_most)
            cost = self._tariff.cost(model.price, usage, synchronous=False)
        return ModelCheck(
            survey=survey,
            input_tokens=counted.tokens,
            counted_lines=counted.lines,
            enabled=model is not None and self._is_answered(model),
            cost_at_most=cost,
        )

    def _is_answered(self, model: Model) -> bool:
        names = self._answered_names
        return names is None or DEFAULT_UPSTREAM not in model.upstreams or model.name in names

    async def _estimate_seconds(self, owner: Owner, models: list[ModelSurvey]) -> tuple[int, int] | None:
        """Return the least and the most seconds: models run side by side at best, and one after the other at worst."""
        low, high = 0.0, 0.0
        for survey in models:
            rates = await self._store.model_rates(
                owner.project_id,
                survey.model,
                since=int(self._clock.now()) - _HISTORY_SECONDS,
                limit=_HISTORY_BATCHES,
            )
            if not rates:
                return None
            low, high = max(low, survey.lines / max(rates)), high + survey.lines / min(rates)
        return int(low), max(1, round(high))
