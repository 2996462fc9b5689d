"""The operations that are answered at once, and the models they may name."""

from typing import Any

from batchline.api.openapi import schemas
from batchline.api.openapi.answers import Part, answer, json_answer
from batchline.api.openapi.operation import CALLS, MODELS, Operation, body, parameter
from batchline.api.openapi.schemas import STRING, ref
from batchline.domain.errors import BadGateway, GatewayTimeout, InsufficientQuota, NotFound, RateLimited, Refused

_WRONG, _TOO_LONG = "invalid_request_error", "context_length_exceeded"
_PASSED_ON = (
    (400, _WRONG),
    (400, _TOO_LONG),
    (401, "authentication_error"),
    (403, "authentication_error"),
    (404, "not_found_error"),
    (408, _WRONG),
    (409, _WRONG),
    (413, "request_too_large"),
    (420, "insufficient_quota"),
    (431, _WRONG),
    (431, _TOO_LONG),
)
"""What the upstream answers with, where that is not as with any other status from 400 to 499."""

_CALL_ERRORS = (
    *(Refused(status, f"upstream returned {status}", code=code) for status, code in _PASSED_ON),
    RateLimited("This project has 256 calls under way already. Try again shortly.", retry_after=1),
    InsufficientQuota(),
    BadGateway("The upstream failed"),
    GatewayTimeout("The upstream took too long"),
)
_EVENTS = {"text/event-stream": {"example": 'data: {"choices":[…]}\n\ndata: [DONE]\n\n'}}
_ANYTHING = {"application/json": {"schema": {"description": "What the upstream answered, unchanged."}}}


def _call(path: str, name: str, summary: str, schema: str, example: object, content: Part, **more: Any) -> Operation:
    return Operation(
        method="post",
        path=path,
        id=name,
        tag=CALLS,
        summary=summary,
        body=body("application/json", schema, example),
        answers={"2XX": answer("The upstream's answer, with its status.", content)},
        errors=_CALL_ERRORS,
        **more,
    )


CALL_OPERATIONS = (
    _call(
        "/v1/chat/completions",
        "createChatCompletion",
        "Complete a chat",
        "ChatRequest",
        schemas.CHAT_EXAMPLE,
        {"application/json": {"schema": ref("ChatCompletion")}} | _EVENTS,
        description="The same request and answer as a line of a batch. With `stream: true` the answer comes as "
        "server-sent events; if it breaks off, its last event is an error in the envelope.",
    ),
    _call("/v1/responses", "createResponse", "Respond", "Call", schemas.RESPONSE_EXAMPLE, _ANYTHING | _EVENTS),
    _call("/summary", "summarize", "Summarize a text", "Call", schemas.TEXT_EXAMPLE, _ANYTHING),
    _call("/usecase/classify/iab", "classifyIab", "Classify by IAB topic", "Call", schemas.TEXT_EXAMPLE, _ANYTHING),
    _call("/gliner", "findEntities", "Find entities in a text", "Call", schemas.LABELS_EXAMPLE, _ANYTHING),
)

MODEL_OPERATIONS = (
    Operation(
        method="get",
        path="/v1/models",
        id="listModels",
        tag=MODELS,
        summary="List models",
        description="Those enabled for the project; where none are configured, the upstream's own.",
        answers={"200": json_answer("The models.", "ModelList")},
        errors=(BadGateway("The upstream failed"), GatewayTimeout("The upstream took too long")),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        id="retrieveModel",
        tag=MODELS,
        summary="Retrieve a model",
        parameters=(parameter("model", "path", STRING | {"minLength": 1}, "Its id.", example=schemas.MODEL_ID),),
        answers={"200": json_answer("The model.", "Model")},
        errors=(
            NotFound("The model x does not exist", code="model_not_found", param="model"),
            NotFound("Unknown route: GET /v1/models/x"),
            BadGateway("The upstream failed"),
            GatewayTimeout("The upstream took too long"),
        ),
    ),
)
