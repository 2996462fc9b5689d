"""Defines every setting: a flag, else ``BATCHLINE_*`` in the environment, else the TOML file, else the default."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from batchline.domain.embedded_model import ANY_MODEL, EMBEDDED_MODEL
from batchline.domain.endpoints import CHAT, SYNC_ONLY
from batchline.domain.limits import InputLimits, StorageLimits
from batchline.domain.models import CLASSIFIER_UPSTREAM, DEFAULT_UPSTREAM, Catalog, Model, ModelKind
from batchline.domain.money import Price, Tariff, nano
from batchline.domain.request_rules import FORBIDDEN_FIELDS, TOOL_TYPES, FieldRules, RequestRules, strictest
from batchline.domain.retry import RetryPolicy

MiB = 1024 * 1024
DAY = 86_400
_MAX_SECONDS = 100 * 365 * DAY
"""More cannot be meant. Times beyond the year 9999 could not be shown."""
_ENDPOINT = re.compile(r"(/[A-Za-z0-9_.~-]+)+")

UNKNOWN_MODEL = "MODEL"
"""Stands in examples for a model of the upstream, whose models are known only to itself."""
_EMBEDDED_SLOTS = 4
_URL = r"^https?://[^/]+.*"
Amount = Annotated[Decimal, Field(ge=0, decimal_places=9, max_digits=18)]


class UpstreamSettings(BaseModel):
    """A table ``[upstreams.NAME]`` of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="Base URL of an OpenAI-compatible API, ending in /v1.", pattern=_URL)
    api_key: SecretStr | None = Field(default=None, description="Key that is sent to the upstream as a bearer token.")
    headers: dict[str, SecretStr] = Field(default={}, description="Additional headers for every request, by name.")
    forbidden_fields: tuple[str, ...] | None = Field(
        default=None, description="Fields that requests may not set; if not set, forbidden_fields of all upstreams."
    )
    tool_types: tuple[str, ...] | None = Field(
        default=None, description="Types of tools that requests may have; if not set, tool_types of all upstreams."
    )
    media_hosts: tuple[str, ...] | None = Field(
        default=None, description="Hosts that links may name; if not set, media_hosts of all upstreams."
    )


class ModelSettings(BaseModel):
    """A table ``[models.ID]`` of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    upstream: Annotated[
        tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
    ] = Field(
        default=(DEFAULT_UPSTREAM,),
        min_length=1,
        description="Name of the upstream that serves the model, or a list of names; classifier is the built-in one.",
    )
    name: str | None = Field(
        default=None, description="Name of the model at the upstream; if not set, its id here.", min_length=1
    )
    kind: ModelKind = Field(
        default=ModelKind.CHAT, description="chat, or classification if the answers are JSON documents."
    )
    input_price: Amount = Field(default=Decimal(0), description="Price of a million input tokens, in units.")
    cached_input_price: Amount | None = Field(
        default=None, description="Price of a million cached input tokens, in units; if not set, input_price."
    )
    output_price: Amount = Field(default=Decimal(0), description="Price of a million output tokens, in units.")
    max_tokens: int | None = Field(default=None, gt=0, description="Maximum number of input tokens.")
    error_on_max_token: bool = Field(
        default=True, description="Refuse a longer input; if off, the end of its last user text is cut off."
    )
    projects: frozenset[str] | None = Field(
        default=None, description="Ids of the projects that may use the model; if not set, all projects."
    )
    paths: frozenset[str] = Field(
        default=frozenset(), description="Routes that use this model when a request names none, such as /gliner."
    )

    def model(self, model_id: str) -> Model:
        """Return the model with this id."""
        cached = self.input_price if self.cached_input_price is None else self.cached_input_price
        return Model(
            id=model_id,
            upstreams=self.upstream,
            name=self.name or model_id,
            kind=self.kind,
            price=Price(input=nano(self.input_price), cached_input=nano(cached), output=nano(self.output_price)),
            max_tokens=self.max_tokens,
            error_on_max_token=self.error_on_max_token,
            projects=self.projects,
            paths=self.paths,
        )


class ProjectSettings(BaseModel):
    """A table ``[projects.ID]`` of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    storage_bytes: int | None = Field(
        default=None, gt=0, description="Maximum size of all files of the project; if not set, project_storage_bytes."
    )
    daily_budget: Amount | None = Field(
        default=None,
        description="What the project may spend in a day, from 00:00 UTC, in units; if not set, there is no limit. It "
        "needs metering.",
    )


class OrganizationSettings(BaseModel):
    """A table ``[organizations.ID]`` of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    storage_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Maximum size of all files of the organization; if not set, organization_storage_bytes.",
    )


class Settings(BaseSettings):
    """All settings of the service, validated."""

    model_config = SettingsConfigDict(
        env_prefix="BATCHLINE_", env_ignore_empty=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    config: Path | None = Field(default=None, description="TOML file with settings, such as port = 8000.")
    host: str = Field(
        default="127.0.0.1", description="Address to listen on; the default is reachable only from this machine."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 selects a free port.")
    data_dir: Path = Field(default=Path("batchline-data"), description="Folder for the database and the files.")
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL instead of the database in the folder: postgresql://user:password@host/name.",
    )
    database_pooler: bool = Field(
        default=False, description="Set to on if PostgreSQL is behind a connection pooler in transaction mode."
    )
    storage_url: str | None = Field(
        default=None,
        description="Bucket instead of the files in the folder: s3://bucket/prefix. AWS_* variables set endpoint and "
        "credentials.",
        pattern=r"^s3://[^/]+",
    )
    upstream_url: str | None = Field(
        default=None,
        description="Base URL of the OpenAI-compatible API that answers the requests, ending in /v1.",
        pattern=_URL,
    )
    upstream_api_key: SecretStr | None = Field(
        default=None, description="Key that is sent to the upstream as a bearer token."
    )
    upstreams: dict[str, UpstreamSettings] = Field(default={}, description="Additional upstreams, by name.")
    forbidden_fields: Annotated[tuple[str, ...], NoDecode] = Field(
        default=FORBIDDEN_FIELDS,
        description="Fields that requests may not set, because the upstream would act on them with the operator's "
        "key, separated by commas; none forbids no field.",
    )
    tool_types: Annotated[tuple[str, ...], NoDecode] = Field(
        default=TOOL_TYPES,
        description="Types of tools that requests may have, separated by commas; * allows hosted tools too.",
    )
    media_hosts: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        default=None,
        description="Hosts that links to images and files may name, separated by commas; if not set, any host.",
    )
    models: dict[str, ModelSettings] = Field(
        default={}, description="Models that clients can use, by id; if there are none, every id is accepted."
    )
    projects: dict[str, ProjectSettings] = Field(default={}, description="Limits of single projects, by id.")
    organizations: dict[str, OrganizationSettings] = Field(
        default={}, description="Limits of single organizations, by id."
    )
    admin_token: SecretStr | None = Field(
        default=None,
        description="Bearer token that gives other machines access to /metrics, and opens all projects in the console.",
    )
    bearer: bool = Field(default=True, description="Accept `Authorization: Bearer KEY` instead of the two headers.")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("*",), description="Origins from which browsers may call the API, separated by commas."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Least level of the log lines; debug has polls of batches, health checks and scrapes too.",
    )
    log_format: Literal["logfmt", "json"] = Field(
        default="logfmt", description="Form of the log lines: key=value pairs, or one JSON object on each line."
    )
    traces: bool = Field(
        default=False,
        description="Send OpenTelemetry traces to the receiver that OTEL_EXPORTER_OTLP_ENDPOINT names. Needs "
        "batchline[otel].",
    )
    trace_line_share: float = Field(
        default=0.01, ge=0, le=1, description="Share of the lines of a batch that are traced, beside its first line."
    )

    metering: bool = Field(
        default=False, description="Charge for answers, and refuse requests when the balance is used up."
    )
    free_credits: Amount = Field(
        default=Decimal(5), description="Credits of a new organization if metering is on, in units."
    )
    batch_price_percent: int = Field(
        default=50,
        ge=0,
        le=100,
        description="Price of a line of a batch, in percent of the price of a synchronous call.",
    )

    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of parallel requests to one upstream; if not set, found by measuring throughput.",
    )
    upstream_metrics: bool = Field(
        default=True,
        description="Read the queue length of an inference engine (vLLM, SGLang, llama.cpp, TGI) from its /metrics.",
    )
    worker_processes: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of processes of `serve` that run lines; if not set, one per core. More than one "
        "run only while one cannot keep up.",
    )
    request_timeout_seconds: float = Field(default=600, gt=0, description="Timeout for one answer of the upstream.")
    connect_timeout_seconds: float = Field(default=10, gt=0, description="Timeout for a connection to the upstream.")
    max_answer_bytes: int = Field(default=16 * MiB, gt=0, description="Maximum size of an answer of the upstream.")
    max_attempts: int = Field(default=4, ge=1, description="Number of attempts before a line fails.")
    max_throttles: int = Field(default=12, ge=0, description="Number of 429 answers after which a line fails.")
    retry_base_seconds: float = Field(default=1, ge=0, description="Delay before the second attempt, without jitter.")
    upstream_patience_seconds: float = Field(
        default=3600,
        ge=0,
        description="How long lines wait for an unavailable upstream before failed attempts count again.",
    )

    completion_window_seconds: int = Field(default=DAY, ge=1, description="Time after which a batch expires.")
    file_retention_seconds: int = Field(default=30 * DAY, ge=1, description="Time after which files are deleted.")
    work_retention_seconds: int = Field(
        default=DAY,
        ge=0,
        description="Time after the end of a batch for which its work file and segments are kept, so that an older "
        "copy of the database finds them.",
    )
    reuse_max_age_seconds: int = Field(
        default=30 * DAY, ge=0, description="Age of a batch up to which `reuse` takes its answers for the same lines."
    )
    reuse_max_lines: int = Field(
        default=2_000_000,
        ge=0,
        description="Maximum number of earlier answers that a batch with `reuse` looks through, newest first.",
    )
    sweep_max_percent: int = Field(
        default=5,
        ge=0,
        le=100,
        description="Maximum share of all objects, in percent, that one sweep deletes because no row names them; if "
        "there are more, it deletes none of them.",
    )
    lease_seconds: float = Field(
        default=30,
        gt=0,
        description="Time without a heartbeat after which other processes take over the shards of a process.",
    )
    shutdown_grace_seconds: float = Field(
        default=30, ge=0, description="Time that requests in flight have to finish after SIGTERM."
    )

    webhook_private: bool = Field(
        default=False,
        description="Let webhooks reach private and link-local addresses too, such as receivers in the same network.",
    )

    max_file_bytes: int = Field(default=100 * MiB, gt=0, description="Maximum size of an uploaded file.")
    project_storage_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Maximum size of all files of one project, inputs and results; if not set, there is no limit.",
    )
    organization_storage_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Maximum size of all files of all projects of one organization; if not set, there is no limit.",
    )
    max_batch_bytes: int = Field(default=200 * MiB, gt=0, description="Maximum size of the input file of a batch.")
    max_batch_lines: int = Field(default=50_000, gt=0, description="Maximum number of lines of a batch.")
    max_line_bytes: int = Field(default=MiB, gt=0, description="Maximum size of a line of a batch.")
    batch_endpoints: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(CHAT,), description="Endpoints that lines of a batch may use, separated by commas."
    )
    max_held_bytes: int = Field(
        default=256 * MiB,
        gt=0,
        description="Maximum size of the answers that a process holds in memory while they arrive and until they are "
        "stored.",
    )
    max_project_requests: int = Field(
        default=64,
        ge=1,
        description="Maximum number of parallel uploads and creates of one project, of its parallel reads of results, "
        "and of its parallel lists.",
    )
    max_project_downloads: int = Field(
        default=64, ge=1, description="Maximum number of parallel downloads of files of one project."
    )
    max_project_calls: int = Field(
        default=256, ge=1, description="Maximum number of parallel synchronous calls of one project."
    )
    max_key_reads_per_second: float = Field(
        default=500, gt=0, description="Maximum number of reads (GET) per second of one key, in each process."
    )
    max_call_bytes: int = Field(
        default=256 * MiB,
        gt=0,
        description="Maximum size of the bodies of all synchronous calls under way in a process.",
    )
    max_project_call_bytes: int = Field(
        default=64 * MiB,
        gt=0,
        description="Maximum size of the bodies of one project's synchronous calls under way in a process.",
    )
    max_request_bytes: int = Field(default=4 * MiB, gt=0, description="Maximum size of the body of a synchronous call.")

    header_timeout_seconds: float = Field(default=15, gt=0, description="Timeout for the headers of a request.")
    body_timeout_seconds: float = Field(
        default=30,
        gt=0,
        description="Time after which a client that does not send the body of its request is disconnected; at least "
        "16 KiB must arrive in this time.",
    )
    write_timeout_seconds: float = Field(
        default=30,
        gt=0,
        description="Time after which a client that does not read its answer is disconnected; at least 128 KiB must be "
        "read in this time.",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of open connections of clients; if not set, 4096. It is never more than half of "
        "the file descriptors that the process may have.",
    )

    @field_validator("cors_origins", "batch_endpoints", "forbidden_fields", "tool_types", "media_hosts", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("batch_endpoints")
    @classmethod
    def _check_endpoints(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise ValueError(f"{endpoint} is no path such as /v1/embeddings")
            if endpoint in SYNC_ONLY:
                raise ValueError(f"{endpoint} cannot be used in batches")
        return endpoints

    @field_validator("database_url")
    @classmethod
    def _check_database(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError("must begin with postgresql://")
        return url

    @field_validator("*")
    @classmethod
    def _check_time(cls, value: Any, field: ValidationInfo) -> Any:
        if str(field.field_name).endswith("_seconds") and value > _MAX_SECONDS:
            raise ValueError(f"must be at most {_MAX_SECONDS}, which is 100 years")
        return value

    @model_validator(mode="after")
    def _check_upstreams(self) -> Self:
        if DEFAULT_UPSTREAM in self.upstreams:
            raise ValueError(f"upstreams.{DEFAULT_UPSTREAM}: the default upstream is set with upstream_url")
        if CLASSIFIER_UPSTREAM in self.upstreams:
            raise ValueError(f"upstreams.{CLASSIFIER_UPSTREAM}: this name is reserved for the built-in classifier")
        for model_id, model in self.models.items():
            for name in model.upstream:
                if name not in {DEFAULT_UPSTREAM, CLASSIFIER_UPSTREAM, *self.upstreams}:
                    raise ValueError(f"models.{model_id}: there is no upstream {name}")
        return self

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        limited = [key for key, project in self.projects.items() if project.daily_budget is not None]
        if limited and not self.metering:
            raise ValueError(f"projects.{limited[0]}: daily_budget needs metering, which is off")
        return self

    @property
    def day_limits(self) -> dict[str, int]:
        """The nano-units that single projects may spend in a day, by id."""
        return {
            key.lower(): nano(project.daily_budget)
            for key, project in self.projects.items()
            if project.daily_budget is not None
        }

    @property
    def all_upstreams(self) -> dict[str, UpstreamSettings]:
        """All upstreams by name, including the default one if ``upstream_url`` is set."""
        if self.upstream_url is None:
            return dict(self.upstreams)
        default = UpstreamSettings(url=self.upstream_url, api_key=self.upstream_api_key)
        return {DEFAULT_UPSTREAM: default, **self.upstreams}

    @property
    def embeds_model(self) -> bool:
        """Whether the embedded model is used: it replaces the default upstream if ``upstream_url`` is not set."""
        used = {name for model in self.models.values() for name in model.upstream} or {DEFAULT_UPSTREAM}
        return self.upstream_url is None and DEFAULT_UPSTREAM in used

    @property
    def embedded_names(self) -> tuple[str, ...]:
        """The model names that the embedded model answers to: its own, any, and those that models map to it."""
        mapped = (
            model.name or model_id for model_id, model in self.models.items() if DEFAULT_UPSTREAM in model.upstream
        )
        return tuple(dict.fromkeys((EMBEDDED_MODEL, ANY_MODEL, *mapped)))

    @property
    def models_by_upstream(self) -> dict[str, list[str]]:
        """The configured models of every upstream; an upstream that takes any model has none."""
        served: dict[str, list[str]] = {name: [] for name in self.all_upstreams}
        if self.embeds_model:
            served[DEFAULT_UPSTREAM] = []
        for model_id, model in self.models.items():
            for name in model.upstream:
                served.setdefault(name, []).append(model_id)
        return served

    @property
    def example_model(self) -> str:
        """A model for examples of requests: one that every project may use, the embedded one, or a placeholder."""
        open_models = (model_id for model_id, model in self.models.items() if model.projects is None)
        return next(open_models, EMBEDDED_MODEL if self.embeds_model else UNKNOWN_MODEL)

    @property
    def classifies(self) -> bool:
        """Whether a model uses the built-in classifier."""
        return any(CLASSIFIER_UPSTREAM in model.upstream for model in self.models.values())

    @property
    def embedded_slots(self) -> int:
        """The number of requests that the embedded model answers at once."""
        return self.max_concurrency or _EMBEDDED_SLOTS

    def cap(self, upstream: str) -> int | None:
        """Return the maximum number of requests in flight to an upstream, or None if there is no limit."""
        if upstream == DEFAULT_UPSTREAM and self.embeds_model:
            return self.embedded_slots
        return self.max_concurrency

    @property
    def catalog(self) -> Catalog:
        """The models that clients can use."""
        return Catalog(model.model(model_id) for model_id, model in self.models.items())

    @property
    def request_rules(self) -> RequestRules:
        """The rules for the fields of requests that may reach the upstreams."""
        rules = {name: self._rules_of(upstream) for name, upstream in self.upstreams.items()}
        default = self._rules_of(None)
        by_model = {
            model_id: strictest(rules.get(name, default) for name in model.upstream)
            for model_id, model in self.models.items()
        }
        return RequestRules(default=default, by_model=by_model)

    def _rules_of(self, upstream: UpstreamSettings | None) -> FieldRules:
        """Return the rules of an upstream, or of the default one."""

        def chosen(name: str) -> tuple[str, ...] | None:
            own: tuple[str, ...] | None = getattr(upstream, name, None)
            everywhere: tuple[str, ...] | None = getattr(self, name)
            return everywhere if own is None else own

        tool_types, media_hosts = chosen("tool_types") or (), chosen("media_hosts")
        return FieldRules(
            forbidden=frozenset(name.casefold() for name in chosen("forbidden_fields") or ()) - {"none"},
            tool_types=None if "*" in tool_types else frozenset(tool_types),
            media_hosts=None if media_hosts is None else frozenset(host.lower() for host in media_hosts),
        )

    @property
    def tariff(self) -> Tariff:
        """The tariff by which answers are charged."""
        return Tariff(metered=self.metering, batch_percent=self.batch_price_percent)

    @property
    def retry_policy(self) -> RetryPolicy:
        """The policy by which a line is attempted again."""
        return RetryPolicy(
            max_attempts=self.max_attempts, max_throttles=self.max_throttles, base_seconds=self.retry_base_seconds
        )

    @property
    def input_limits(self) -> InputLimits:
        """The limits for the input file of a batch."""
        return InputLimits(
            max_bytes=self.max_batch_bytes,
            max_lines=self.max_batch_lines,
            max_line_bytes=self.max_line_bytes,
            endpoints=self.batch_endpoints,
            models=frozenset(self.models),
            rules=self.request_rules,
        )

    @property
    def storage_limits(self) -> StorageLimits:
        """The bytes that projects and organizations may store."""
        return StorageLimits(
            project=self.project_storage_bytes,
            organization=self.organization_storage_bytes,
            projects={key.lower(): table.storage_bytes for key, table in self.projects.items()},
            organizations={key.lower(): table.storage_bytes for key, table in self.organizations.items()},
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        named = init_settings().get("config") or env_settings().get("config")
        toml = (TomlConfigSettingsSource(settings_cls, toml_file=Path(named)),) if named else ()
        return (init_settings, env_settings, *toml)
