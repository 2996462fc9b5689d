"""The operations for whoever runs the service, and its description."""

from batchline.api.openapi.answers import AUTHENTICATION, Part, answer
from batchline.api.openapi.operation import ADMINISTRATOR, NOBODY, SERVICE, Operation, parameter
from batchline.api.openapi.schemas import STRING
from batchline.domain.errors import NotFound


def _status_answer(description: str, *names: str) -> Part:
    schema = {
        "type": "object",
        "required": list(names),
        "additionalProperties": False,
        "properties": dict.fromkeys(names, STRING),
    }
    return answer(description, {"application/json": {"schema": schema}})


SERVICE_OPERATIONS = (
    Operation(
        method="get",
        path="/healthz",
        id="health",
        tag=SERVICE,
        summary="Is the process alive?",
        asks_for=NOBODY,
        answers={"200": _status_answer("It is.", "status")},
    ),
    Operation(
        method="get",
        path="/readyz",
        id="readiness",
        tag=SERVICE,
        summary="Can it do its work?",
        asks_for=NOBODY,
        answers={"200": _status_answer("It can.", "status", "database", "storage")},
    ),
    Operation(
        method="get",
        path="/metrics",
        id="metrics",
        tag=SERVICE,
        summary="Metrics for Prometheus",
        description="Open to the machine itself; others need the administrator's token.",
        asks_for=ADMINISTRATOR,
        answers={"200": answer("Prometheus' text format.", {"text/plain": {"schema": STRING}})},
        errors=AUTHENTICATION,
    ),
    Operation(
        method="get",
        path="/openapi.json",
        id="openapi",
        tag=SERVICE,
        summary="This document",
        asks_for=NOBODY,
        answers={"200": answer("OpenAPI 3.1.", {"application/json": {"schema": {"type": "object"}}})},
    ),
    Operation(
        method="get",
        path="/docs",
        id="docs",
        tag=SERVICE,
        summary="This document as a page",
        asks_for=NOBODY,
        answers={"200": answer("The page.", {"text/html": {"schema": STRING}}, headers=("content-security-policy",))},
    ),
    Operation(
        method="get",
        path="/docs/{asset}",
        id="docsAsset",
        tag=SERVICE,
        summary="A part of that page",
        asks_for=NOBODY,
        parameters=(parameter("asset", "path", STRING | {"minLength": 1}, "Its name.", example="docs.css"),),
        answers={
            "200": answer(
                "A style or a script.", {kind: {"schema": STRING} for kind in ("text/css", "text/javascript")}
            )
        },
        errors=(NotFound("Unknown route: GET /docs/x"),),
    ),
)
