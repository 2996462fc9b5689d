"""The document at /openapi.json says what the service does: no more, and no less."""

import ast
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from jsonschema_rs import Draft202012Validator
from msgspec import Raw, to_builtins
from msgspec.json import encode
from starlette.routing import Route

import batchline
import batchline.api
from batchline.api.create_fields import read_extension
from batchline.api.openapi.document import describe
from batchline.domain.embedded_model import EMBEDDED_MODEL
from batchline.domain.errors import ApiError, InvalidRequest
from batchline.domain.outcomes import Failure, Outcome, Retryable, Success, classify_reply, error_line, output_line
from batchline.domain.records import Batch, File
from batchline.domain.replies import Answer, Fault, FaultKind
from batchline.domain.reuse import answer_of, copied_line
from batchline.domain.states import BatchStatus
from batchline.domain.wire import BatchObject, ErrorBody, FileObject
from batchline.pipeline.inference import PATHS, _fault_error, _refusal
from batchline.settings import UNKNOWN_MODEL, Settings
from tests.support.api_server import LINE, Api

Document = dict[str, Any]
_SOURCE = Path(batchline.__file__).parent
_EMPTY_IDS = {
    "/v1/files/": "/v1/files/{file_id}",
    "/v1/files//content": "/v1/files/{file_id}/content",
    "/v1/batches/": "/v1/batches/{batch_id}",
    "/v1/batches//progress": "/v1/batches/{batch_id}/progress",
    "/v1/batches//cancel": "/v1/batches/{batch_id}/cancel",
    "/v1/batches//rerun": "/v1/batches/{batch_id}/rerun",
    "/v1/batches//results": "/v1/batches/{batch_id}/results",
    "/v1/batches//merged": "/v1/batches/{batch_id}/merged",
    "/v1/batches//release": "/v1/batches/{batch_id}/release",
}
"""A12: an empty id has its own route, which answers 400."""


@pytest.fixture(scope="module")
def document() -> Document:
    return _as_json(describe(bearer=True))


def _as_json(value: object) -> Document:
    decoded: Document = json.loads(json.dumps(value))
    return decoded


def _validator(document: Document, schema: Mapping[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({"components": document["components"], "allOf": [schema]})


def _named(document: Document, name: str) -> Draft202012Validator:
    return _validator(document, {"$ref": f"#/components/schemas/{name}"})


def _resolve(document: Document, part: Any) -> Any:
    while "$ref" in part:
        target = document
        for name in part["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        part = target
    return part


def _operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _answer(document: Document, operation: Document, status: int) -> Document:
    """What is said of a status: by itself, or with its hundred."""
    responses = operation["responses"]
    found: Document = _resolve(document, responses.get(str(status)) or responses[f"{status // 100}XX"])
    return found


def test_the_document_is_served_to_anyone_as_it_is(api: Api) -> None:
    reply = api.call("GET", "/openapi.json", anonymous=True)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == _as_json(describe(bearer=True, model=api.services.settings.example_model))
    assert reply.json["info"]["version"] == batchline.__version__


def test_the_document_is_valid_openapi(document: Document) -> None:
    assert document["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(document).validate()
    names = [operation["operationId"] for _, _, operation in _operations(document)]
    assert len(names) == len(set(names))
    for schema in document["components"]["schemas"].values():
        _validator(document, schema)


def test_every_reference_leads_somewhere_and_nothing_named_is_unused(document: Document) -> None:
    used = set(re.findall(r'"#/components/([^"]+)"', json.dumps(document)))
    named = {f"{kind}/{name}" for kind, parts in document["components"].items() for name in parts}
    named_in_text = {"responses/UnknownRoute", "responses/MethodNotAllowed", "schemas/BatchInputLine"}
    schemes = {name for name in named if name.startswith("securitySchemes/")}
    assert used <= named
    assert named - used == named_in_text | schemes
    required = {name for _, _, operation in _operations(document) for each in operation["security"] for name in each}
    assert {f"securitySchemes/{name}" for name in required} == schemes


@pytest.mark.rule("E2", "Every synchronous route is described.")
def test_the_document_and_the_router_know_the_same_operations(api: Api, document: Document) -> None:
    """Every route is described, and everything described is a route. HEAD comes with GET, OPTIONS with any path."""
    routed = set()
    for route in _router(api):
        path = re.sub(r":path}", "}", route.path)
        methods = set(route.app._handlers) - {"HEAD", "OPTIONS"}
        routed |= {(method.lower(), _EMPTY_IDS.get(path, path)) for method in methods}
    assert routed == {(method, path) for method, path, _ in _operations(document)}


def _router(api: Api) -> list[Any]:
    middleware: Any = api.server._uvicorn.config.app
    routes = middleware._app.routes
    assert all(isinstance(route, Route) for route in routes)
    return list(routes)


def test_every_parameter_of_a_path_is_described(document: Document) -> None:
    for _, path, operation in _operations(document):
        told = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
        assert told == set(re.findall(r"{(\w+)}", path))


def test_every_answer_tells_its_request_id_and_every_error_its_envelope(document: Document) -> None:
    """A5, A6."""
    for _, _, operation in _operations(document):
        for status, response in operation["responses"].items():
            told = _resolve(document, response)
            assert _resolve(document, told["headers"]["x-request-id"])["required"]
            if not status.startswith("2"):
                assert {"$ref": "#/components/schemas/ErrorBody"} in told["content"]["application/json"]["schema"][
                    "allOf"
                ]


def test_every_example_fits_its_schema(document: Document) -> None:
    for schema in document["components"]["schemas"].values():
        if "example" in schema:
            _validator(document, schema).validate(schema["example"])
    for _, _, operation in _operations(document):
        parts = [operation["requestBody"]] if "requestBody" in operation else []
        parts += [_resolve(document, response) for response in operation["responses"].values()]
        for media in (media for part in parts for media in part.get("content", {}).values()):
            examples = [each["value"] for each in media.get("examples", {}).values()]
            examples += [media["example"]] if "example" in media else []
            for example in examples:
                _validator(document, media.get("schema", {})).validate(example)


def test_credentials_are_asked_for_where_they_are_needed(document: Document) -> None:
    """A1, A13, F5: two headers together; or a bearer token alone, unless the service takes none."""
    keys: Document = {"apiKey": [], "projectId": []}
    for _, path, operation in _operations(document):
        if path == "/metrics":
            assert operation["security"] == [{}, {"administrator": []}]
        elif path.startswith("/v1/") or path in PATHS:
            assert operation["security"] == [keys, {"bearer": []}]
        else:
            assert operation["security"] == []
    for _, path, operation in _operations(_as_json(describe(bearer=False))):
        assert {"bearer": []} not in operation["security"], path


def test_the_service_asks_for_credentials_where_the_document_says_so(api: Api) -> None:
    """A1: 401 exactly where two headers are named."""
    for method, path, operation in _operations(_as_json(describe(bearer=False))):
        reply = api.call(method.upper(), re.sub(r"{\w+}", "x", path), anonymous=True)
        assert (reply.status == 401) is ({"apiKey": [], "projectId": []} in operation["security"]), path


@pytest.mark.parametrize("path", PATHS)
def test_all_that_an_upstream_can_answer_a_call_with_is_described(document: Document, path: str) -> None:
    """E2: the upstream's 4xx as it came, its 5xx and its silence, all in the envelope."""
    operation = document["paths"][path]["post"]
    bodies = (b"", b'{"error":{"code":"insufficient_quota"}}', b'{"error":{"code":"context_length_exceeded"}}')
    answers = [Answer(status=status, body=body) for status in range(300, 600) for body in bodies]
    errors = [_refusal(answer, _no_success(classify_reply(answer, endpoint=path))) for answer in answers]
    errors += [_fault_error(Fault(kind=kind, detail="gone")) for kind in FaultKind]
    by_status = sorted(errors, key=lambda error: error.status)
    for status, group in groupby(by_status, key=lambda error: error.status):
        told = _answer(document, operation, status)
        validator = _validator(document, told["content"]["application/json"]["schema"])
        for error in group:
            validator.validate(_as_json(to_builtins(ErrorBody.from_error(error))))
            assert set(error.headers) <= set(told["headers"]), status


def _no_success(outcome: Outcome) -> Failure | Retryable:
    assert not isinstance(outcome, Success)
    return outcome


def _raised() -> set[str | None]:
    """The codes of every error that the source makes, wherever it makes it."""
    for module in pkgutil.walk_packages([str(_SOURCE)], "batchline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = {kind.__name__: kind for kind in _kinds(ApiError)}
    paths = [path for path in _SOURCE.rglob("*.py") if "openapi" not in path.parts]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    codes: set[str | None] = set()
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in kinds:
            codes.add(kinds[node.exc.id].code)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
            codes |= _code_of(node, kinds[node.func.id])
    return codes


def _code_of(call: ast.Call, kind: type[ApiError]) -> set[str | None]:
    """Return the code of a call; codes that are passed on are covered by the test of upstream answers."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    if not given:
        return {kind.code}
    return {given[0].value} if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else set()


def _kinds(root: type[ApiError]) -> Iterator[type[ApiError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from _kinds(kind)


@pytest.mark.rule("A6", "Every error code of the service stands in its OpenAPI document.")
def test_every_error_code_of_the_source_is_described_and_no_other(document: Document) -> None:
    """A6, A12."""
    operations = [operation["responses"] for _, _, operation in _operations(document)]
    answers = [answer for each in operations for status, answer in each.items() if not status.startswith("2")]
    answers += [{"$ref": f"#/components/responses/{name}"} for name in document["components"]["responses"]]
    contents = [_resolve(document, answer)["content"]["application/json"] for answer in answers]
    narrowed = [media["schema"]["allOf"][1]["properties"]["error"]["properties"] for media in contents]
    told = {code for each in narrowed for code in each["code"]["enum"]}
    upstreams_own = {"authentication_error", "context_length_exceeded"}
    assert _raised() == told - upstreams_own


def test_every_code_of_an_error_file_is_described(document: Document) -> None:
    """D2."""
    tree = ast.parse((_SOURCE / "domain" / "outcomes.py").read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Failure"]
    codes = {str(call.args[0].value) for call in made if isinstance(call.args[0], ast.Constant)}
    for status in range(400, 500):
        outcome = classify_reply(Answer(status=status, body=b""), endpoint="/v1/embeddings")
        codes |= {outcome.code} if isinstance(outcome, Failure) else set()
    line = _named(document, "BatchErrorLine")
    for code in codes:
        line.validate(json.loads(error_line("batch_req_1", b'"x"', Failure(code, "http_400", "so it is"))))
    assert not line.is_valid(json.loads(error_line("batch_req_1", b'"x"', Failure("unheard_of", "http_400", "no"))))


def test_an_output_line_is_as_described_with_an_own_and_with_a_reused_answer(document: Document) -> None:
    """D2, G7."""
    own = output_line("batch_req_1_0", b'"x"', Success(200, "req-1", b'{"choices":[]}'))
    reused = copied_line(b"2", 0, b'"y"', answer_of(own))
    for line in (own, reused):
        _named(document, "BatchOutputLine").validate(json.loads(line))


@pytest.mark.parametrize("is_error", [True, False])
def test_a_file_is_as_described(document: Document, is_error: bool) -> None:
    """B: these fields and no other, and ``is_error`` on error files only."""
    record = File(
        id="file-1",
        project_id="p",
        filename="x",
        purpose="batch_output",
        bytes=1,
        created_at=1,
        expires_at=2,
        is_error=is_error,
        object_key="k",
    )
    file = to_builtins(FileObject.from_record(record))
    schema = _named(document, "FileObject")
    schema.validate(file)
    assert not schema.is_valid(file | {"status_details": None})
    assert not schema.is_valid({name: value for name, value in file.items() if name != "expires_at"})


@pytest.mark.parametrize("status", BatchStatus)
def test_a_batch_is_as_described_in_every_state(document: Document, status: BatchStatus) -> None:
    """C: the same fields in every state."""
    described = document["components"]["schemas"]["BatchObject"]
    assert set(described["required"]) == set(described["properties"])
    for filled in (_batch(status, 7), _batch(status, None)):
        _named(document, "BatchObject").validate(_as_json(filled))


def _batch(status: BatchStatus, at: int | None) -> Document:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = Batch(
        id="batch_01K9ZQ3V8M4T2X6R0B7N5C1D9F",
        project_id="p",
        key_id="k",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        metadata=b'{"a":1}',
        status=status,
        created_at=1,
        expires_at=2,
        errors=b'{"object":"list","data":[]}' if at else None,
        output_file_id="file-2" if at else None,
        model="m" if at else None,
        **{f"{name}_at": at for name in times},  # type: ignore[arg-type]
    )
    wire: Document = json.loads(encode(BatchObject.from_record(batch)))
    return wire


def test_answers_of_the_service_are_as_described(api: Api, document: Document) -> None:
    """B1, B5, B8, C3, C7, C9: the real thing against its description, field by field."""
    uploaded = api.upload(LINE).json
    batch = api.create(input_file_id=uploaded["id"], endpoint="/v1/chat/completions").json
    seen: list[tuple[str, Any]] = [
        ("FileObject", uploaded),
        ("BatchObject", batch),
        ("BatchObject", api.call("GET", f"/v1/batches/{batch['id']}").json),
        ("BatchObject", api.call("POST", f"/v1/batches/{batch['id']}/cancel").json),
        ("FileList", api.call("GET", "/v1/files?limit=1").json),
        ("BatchList", api.call("GET", "/v1/batches?limit=1").json),
        ("DeletedFile", api.call("DELETE", f"/v1/files/{uploaded['id']}").json),
    ]
    for name, value in seen:
        _named(document, name).validate(value)


def test_a_refused_input_file_is_as_described(api: Api, document: Document) -> None:
    """C3: ``line`` in the envelope, the batch's id in a header, and all faults in the batch."""
    uploaded = api.upload(b"{}\n").json
    reply = api.create(input_file_id=uploaded["id"], endpoint="/v1/chat/completions")
    told = _answer(document, document["paths"]["/v1/batches"]["post"], reply.status)
    _validator(document, told["content"]["application/json"]["schema"]).validate(reply.json)
    assert reply.json["error"]["line"] == 1
    assert "x-batch-id" in told["headers"]
    batch = api.call("GET", f"/v1/batches/{reply.headers['x-batch-id']}").json
    _named(document, "BatchObject").validate(batch)
    assert batch["errors"]["data"]


def test_what_goes_beyond_openai_in_a_create_is_as_described(document: Document) -> None:
    """G1: the service and its description take the same values, so that a generated client can send each of them."""
    schema = _named(document, "CreateOptions")
    values = (None, True, False, 0, 2.5, 10**9, 10**9 + 1, -1, "1")
    for given in [{name: value} for name in ("hold", "reuse", "max_cost", "other") for value in values]:
        assert schema.is_valid(given) is _is_taken({"batchline": given}), given


def _is_taken(fields: Document) -> bool:
    try:
        read_extension({name: Raw(encode(value)) for name, value in fields.items()})
    except InvalidRequest:
        return False
    return True


def test_only_an_input_file_has_lines_to_blame(document: Document) -> None:
    """A6: ``line`` only where an input file was refused."""
    error = {"message": "x", "type": "invalid_request_error", "code": "invalid_request_error", "param": None}
    for method, path, operation in _operations(document):
        told = _answer(document, operation, 400)["content"]["application/json"]["schema"]
        _validator(document, told).validate({"error": error})
        may_have_line = (method, path) in {("post", "/v1/batches"), ("post", "/v1/batches/{batch_id}/rerun")}
        assert _validator(document, told).is_valid({"error": error | {"line": 3}}) is may_have_line


def test_examples_name_a_model_that_the_service_lists(serve: Callable[..., Api]) -> None:
    """E3: who sends an example as it is gets an answer."""
    settings = Settings(models={"secret": {"projects": ["p"]}, "small": {}})  # type: ignore[dict-item]
    api = serve(models=settings.models)
    document = api.call("GET", "/openapi.json", anonymous=True).json
    listed = {model["id"] for model in api.call("GET", "/v1/models").json["data"]}
    assert listed == {"small"}
    assert set(re.findall(r'"model": "([^"]+)"', json.dumps(document))) == listed


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        (Settings(), EMBEDDED_MODEL),
        (Settings(upstream_url="http://127.0.0.1:1/v1"), UNKNOWN_MODEL),
        (Settings(models={"small": {}}), "small"),  # type: ignore[dict-item]
    ],
)
def test_the_model_of_examples_is_one_that_every_project_may_use(settings: Settings, model: str) -> None:
    assert settings.example_model == model
