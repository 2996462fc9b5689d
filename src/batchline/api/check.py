"""The route ``/v1/batches/check``: checks the body and the input file of a create, and stores nothing."""

from starlette.requests import Request
from starlette.responses import Response

from batchline.api.auth import Auth
from batchline.api.batches import create_request, read_create_body
from batchline.api.responses import json_response
from batchline.api.throttle import Throttle
from batchline.domain.wire import BatchCheck, CheckSeconds, ModelCheckObject, errors_of, optional_money
from batchline.pipeline.check import CheckReport, InputCheck, ModelCheck


class CheckRoutes:
    """Checks input files. A check takes as long as a create does, so both count for the same limit."""

    def __init__(self, *, auth: Auth, throttle: Throttle, input_check: InputCheck) -> None:
        self._auth, self._throttle, self._input_check = auth, throttle, input_check

    async def check(self, request: Request) -> Response:
        owner = await self._auth.owner(request)
        with self._throttle.slot(owner.project_id):
            body = await read_create_body(request)
            await self._auth.check_after_body(request)
            report = await self._input_check.check(owner, create_request(body))
        return json_response(_check_object(report))


def _check_object(report: CheckReport) -> BatchCheck:
    return BatchCheck(
        object="batch.check",
        valid=not report.faults,
        errors=errors_of(report.faults) if report.faults else None,
        lines=report.lines,
        models=[_model_object(model) for model in report.models],
        duplicates=report.duplicates,
        seconds=None if report.seconds is None else CheckSeconds(low=report.seconds[0], high=report.seconds[1]),
    )


def _model_object(model: ModelCheck) -> ModelCheckObject:
    return ModelCheckObject(
        model=model.survey.model,
        lines=model.survey.lines,
        enabled=model.enabled,
        input_tokens=model.input_tokens,
        output_tokens_at_most=model.survey.output_tokens_at_most,
        estimated=model.counted_lines < model.survey.lines,
        counted_lines=model.counted_lines,
        cost_at_most=optional_money(model.cost_at_most),
    )
