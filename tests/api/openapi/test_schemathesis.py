"""The service called in all the ways its own description allows, and in many that it does not."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import requests
import schemathesis
from msgspec.json import decode, encode
from schemathesis import Case, CheckContext, Config, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from batchline.api.openapi.document import describe
from tests.support.postgres_server import Postgres
from tests.support.service import CHAT, Service, chat_lines, running_mock, running_service, submit

_SEED = 20_261_115
_LINES = chat_lines(["one", "two"])


def _described(*, examples: int) -> OpenApiSchema:
    """Examples of an operation come beside one for every boundary of every field."""
    schema = schemathesis.openapi.from_dict(decode(encode(describe(bearer=True))), config=Config(seed=_SEED))
    schema.config.generation.update(
        max_examples=examples, deterministic=True, database="none", with_security_parameters=False
    )
    return schema


few, many = _described(examples=3), _described(examples=200)


class Client:
    """Sends cases, every second of an operation to something that exists, and counts what was answered."""

    def __init__(self, service: Service, credentials: dict[str, str]) -> None:
        self._service = service
        self._base_url = f"http://127.0.0.1:{service.port}"
        self._sent: Counter[str] = Counter()
        self.answered: Counter[int] = Counter()
        self.session = requests.Session()
        self._credentials = credentials

    def check(self, case: Case[Any]) -> None:
        """Send a case, and compare the answer with the description. Some checks send it again, without credentials."""
        case.validate_response(
            self._send(case),
            checks=_CHECKS,
            headers=self._credentials,
            transport_kwargs={"base_url": self._base_url, "session": self.session},
        )

    def _send(self, case: Case[Any]) -> Response:
        self._sent[case.operation.label] += 1
        if self._sent[case.operation.label] % 2:
            self._aim(case)
        answer = case.call(base_url=self._base_url, session=self.session, headers=self._credentials)
        self.answered[answer.status_code] += 1
        return answer

    def _aim(self, case: Case[Any]) -> None:
        if "file_id" in case.path_parameters:
            case.path_parameters["file_id"] = self._new_file()
        if "batch_id" in case.path_parameters:
            case.path_parameters["batch_id"] = submit(self._service.client(), _LINES).id
        if "asset" in case.path_parameters:
            case.path_parameters["asset"] = "docs.js"
        if isinstance(case.body, dict) and "input_file_id" in case.body:
            case.body |= {"input_file_id": self._new_file(), "endpoint": CHAT}

    def _new_file(self) -> str:
        return self._service.client().files.create(file=_LINES, purpose="batch").id


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.proof)])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    shared: dict[str, Any] = {}
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres")
        shared["database_url"] = server.new_database()
    with running_mock() as mock, running_service(tmp_path_factory.mktemp("service"), mock.url, **shared) as running:
        yield running


@pytest.fixture(scope="module", params=["bearer", pytest.param("headers", marks=pytest.mark.proof)])
def client(request: pytest.FixtureRequest, service: Service) -> Iterator[Client]:
    bearer = {"authorization": f"Bearer {service.account['api_key']}"}
    client = Client(service, bearer if request.param == "bearer" else service.credentials)
    with closing(client.session):
        yield client
    print(f"\n{client.answered.total()} cases, by status: {dict(sorted(client.answered.items()))}")


def envelope(_context: CheckContext, response: Response, _case: Case[Any]) -> None:
    """A5, A6: an id on every answer, and one envelope around everything that went wrong."""
    [request_id] = response.headers["x-request-id"]
    assert re.fullmatch(r"req_\w+", request_id)
    if response.status_code >= 400:
        error = json.loads(response.content)["error"]
        assert set(error) - {"line"} == {"message", "type", "code", "param"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)


_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    missing_required_header,
    unsupported_method,
    ignored_auth,
    envelope,
]


@few.parametrize()
def test_every_answer_is_as_described_whatever_is_sent(case: Case[Any], client: Client) -> None:
    """A5, A6 and the shapes of B, C and E: no 5xx, and no status, header or body that the description lacks."""
    client.check(case)


@pytest.mark.proof
@many.parametrize()
def test_every_answer_is_as_described_however_much_is_sent(case: Case[Any], client: Client) -> None:
    """A5, A6: the same, for longer."""
    client.check(case)
