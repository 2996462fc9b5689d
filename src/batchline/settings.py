"""Every setting: a flag, else ``BATCHLINE_*`` in the environment, else the TOML file, else the default here."""

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from batchline.domain.limits import InputLimits
from batchline.domain.models import CLASSIFIER_UPSTREAM, DEFAULT_UPSTREAM, Catalog, Model, ModelKind
from batchline.domain.money import Price, Tariff, nano
from batchline.domain.retry import RetryPolicy

MiB = 1024 * 1024
DAY = 86_400

_EMBEDDED_SLOTS = 4
_URL = r"^https?://[^/]+.*"
Amount = Annotated[Decimal, Field(ge=0, decimal_places=9, max_digits=18)]


class UpstreamSettings(BaseModel):
    """A table ``[upstreams.NAME]`` of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="OpenAI-style base URL, ending in /v1.", pattern=_URL)
    api_key: SecretStr | None = Field(default=None, description="Sent to it as a bearer token.")
    headers: dict[str, SecretStr] = Field(default={}, description="Further headers that it wants, by name.")


class ModelSettings(BaseModel):
    """A table ``[models.ID]`` of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    upstream: Annotated[
        tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
    ] = Field(
        default=(DEFAULT_UPSTREAM,),
        min_length=1,
        description="Name of the upstream that serves it, or a list of several; classifier for the built-in one.",
    )
    name: str | None = Field(default=None, description="What the upstream calls it; its id if not given.", min_length=1)
    kind: ModelKind = Field(
        default=ModelKind.CHAT, description="chat, or classification: its answers are JSON documents."
    )
    input_price: Amount = Field(default=Decimal(0), description="Units for a million tokens of input.")
    cached_input_price: Amount | None = Field(
        default=None, description="The same for input that the upstream had cached; as input_price if not given."
    )
    output_price: Amount = Field(default=Decimal(0), description="Units for a million tokens of output.")
    max_tokens: int | None = Field(default=None, gt=0, description="Most tokens of input.")
    error_on_max_token: bool = Field(
        default=True, description="Whether a longer input is refused; else the end of its last user text is cut off."
    )
    projects: frozenset[str] | None = Field(default=None, description="Ids of the projects that may use it.")
    paths: frozenset[str] = Field(
        default=frozenset(), description="Routes it answers for requests that name no model, such as /gliner."
    )

    def model(self, model_id: str) -> Model:
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


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="BATCHLINE_", env_ignore_empty=True, extra="forbid", frozen=True)

    config: Path | None = Field(default=None, description="TOML file with settings, named as here.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback unless told otherwise.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    data_dir: Path = Field(default=Path("batchline-data"), description="Folder of the database and the files.")
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL in place of the folder's database, as postgresql://user:password@host/name.",
    )
    database_pooler: bool = Field(
        default=False, description="Whether PostgreSQL is reached through a pooler in transaction mode."
    )
    storage_url: str | None = Field(
        default=None,
        description="Bucket in place of the folder's files, as s3://bucket/prefix; AWS_* say where and who.",
        pattern=r"^s3://[^/]+",
    )
    upstream_url: str | None = Field(
        default=None,
        description="OpenAI-style base URL that answers the lines, ending in /v1.",
        pattern=_URL,
    )
    upstream_api_key: SecretStr | None = Field(default=None, description="Sent to the upstream as a bearer token.")
    upstreams: dict[str, UpstreamSettings] = Field(default={}, description="More upstreams, by name.")
    models: dict[str, ModelSettings] = Field(
        default={}, description="The models that may be asked, by id; where there are none, any id may."
    )
    admin_token: SecretStr | None = Field(default=None, description="Opens /metrics to other machines.")
    bearer: bool = Field(
        default=False, description="Whether a key sent as a bearer token is enough, with the key's own project."
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("*",), description="Origins that browsers may call from, separated by commas."
    )

    metering: bool = Field(default=False, description="Whether answers are charged for and quota can run out.")
    free_credits: Amount = Field(default=Decimal(5), description="Units a new organization starts with when metered.")
    batch_price_percent: int = Field(
        default=50, ge=0, le=100, description="Price of a batch's line, in percent of a synchronous call's."
    )

    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Most lines in flight to one upstream; as many as make it faster if not given.",
    )
    worker_processes: int | None = Field(
        default=None,
        ge=1,
        description="Processes of serve that run lines, at most; one a core if not given. More than one run only while "
        "one cannot keep up.",
    )
    request_timeout_seconds: float = Field(
        default=600, gt=0, description="How long the upstream may take for one answer."
    )
    connect_timeout_seconds: float = Field(
        default=10, gt=0, description="How long connecting to the upstream may take."
    )
    max_answer_bytes: int = Field(default=16 * MiB, gt=0, description="Largest answer taken from the upstream.")
    max_attempts: int = Field(default=4, ge=1, description="Attempts a line has before it fails.")
    max_throttles: int = Field(default=12, ge=0, description="Times a line may be told 429 before it fails.")
    retry_base_seconds: float = Field(default=1, ge=0, description="First wait between two attempts, before jitter.")
    upstream_patience_seconds: float = Field(
        default=3600, ge=0, description="How long lines wait for an upstream that is gone before faults count again."
    )

    completion_window_seconds: int = Field(default=DAY, ge=1, description="Time a batch has to finish.")
    file_retention_seconds: int = Field(default=30 * DAY, ge=1, description="Time after which files are removed.")
    lease_seconds: float = Field(
        default=30, gt=0, description="Time after which the work of a silent process is taken over."
    )
    shutdown_grace_seconds: float = Field(default=30, ge=0, description="Time that lines in flight get at SIGTERM.")

    max_file_bytes: int = Field(default=100 * MiB, gt=0, description="Largest upload.")
    max_batch_bytes: int = Field(default=200 * MiB, gt=0, description="Largest input file of a batch.")
    max_batch_lines: int = Field(default=50_000, gt=0, description="Most lines of a batch.")
    max_line_bytes: int = Field(default=MiB, gt=0, description="Longest line of a batch.")
    batch_endpoints: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("/v1/chat/completions",), description="Endpoints that lines may name, separated by commas."
    )
    max_held_bytes: int = Field(
        default=256 * MiB, gt=0, description="Answers a process holds before it waits for the disk."
    )
    max_project_requests: int = Field(default=64, ge=1, description="Uploads and creates of one project at once.")
    max_project_calls: int = Field(default=256, ge=1, description="Synchronous calls of one project at once.")
    max_request_bytes: int = Field(default=4 * MiB, gt=0, description="Largest body of a synchronous call.")

    header_timeout_seconds: float = Field(
        default=15, gt=0, description="Time in which a request's headers must be complete."
    )
    body_timeout_seconds: float = Field(default=30, gt=0, description="Longest stall of a request's body.")

    @field_validator("cors_origins", "batch_endpoints", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("database_url")
    @classmethod
    def _check_database(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError("must begin with postgresql://")
        return url

    @model_validator(mode="after")
    def _find_upstreams(self) -> Self:
        if DEFAULT_UPSTREAM in self.upstreams:
            raise ValueError(f"upstreams.{DEFAULT_UPSTREAM}: the default upstream is set with upstream_url")
        if CLASSIFIER_UPSTREAM in self.upstreams:
            raise ValueError(f"upstreams.{CLASSIFIER_UPSTREAM}: this is the name of the built-in classifier")
        for model_id, model in self.models.items():
            for name in model.upstream:
                if name not in {DEFAULT_UPSTREAM, CLASSIFIER_UPSTREAM, *self.upstreams}:
                    raise ValueError(f"models.{model_id}: there is no upstream {name}")
        return self

    @property
    def all_upstreams(self) -> dict[str, UpstreamSettings]:
        """Every upstream by name."""
        if self.upstream_url is None:
            return dict(self.upstreams)
        default = UpstreamSettings(url=self.upstream_url, api_key=self.upstream_api_key)
        return {DEFAULT_UPSTREAM: default, **self.upstreams}

    @property
    def embeds_model(self) -> bool:
        """Whether anything is left to the embedded model: it stands in for a default upstream that is not given."""
        asked = {name for model in self.models.values() for name in model.upstream} or {DEFAULT_UPSTREAM}
        return self.upstream_url is None and DEFAULT_UPSTREAM in asked

    @property
    def classifies(self) -> bool:
        """Whether a model is left to the built-in classifier."""
        return any(CLASSIFIER_UPSTREAM in model.upstream for model in self.models.values())

    @property
    def embedded_slots(self) -> int:
        """Requests that the embedded model answers at once."""
        return self.max_concurrency or _EMBEDDED_SLOTS

    def cap(self, upstream: str) -> int | None:
        """Most lines in flight to an upstream, where something sets a bound."""
        if upstream == DEFAULT_UPSTREAM and self.embeds_model:
            return self.embedded_slots
        return self.max_concurrency

    @property
    def catalog(self) -> Catalog:
        return Catalog(model.model(model_id) for model_id, model in self.models.items())

    @property
    def tariff(self) -> Tariff:
        return Tariff(metered=self.metering, batch_percent=self.batch_price_percent)

    @property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(
            max_attempts=self.max_attempts, max_throttles=self.max_throttles, base_seconds=self.retry_base_seconds
        )

    @property
    def input_limits(self) -> InputLimits:
        return InputLimits(
            max_bytes=self.max_batch_bytes,
            max_lines=self.max_batch_lines,
            max_line_bytes=self.max_line_bytes,
            endpoints=self.batch_endpoints,
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
