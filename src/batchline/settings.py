"""Every setting: a flag, else ``BATCHLINE_*`` in the environment, else the TOML file, else the default here."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from batchline.domain.limits import InputLimits

MiB = 1024 * 1024
DAY = 86_400


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="BATCHLINE_", env_ignore_empty=True, extra="forbid", frozen=True)

    config: Path | None = Field(default=None, description="TOML file with settings, named as here.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback unless told otherwise.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    data_dir: Path = Field(default=Path("batchline-data"), description="Folder of the database and the files.")
    upstream_url: str | None = Field(
        default=None,
        description="OpenAI-style base URL that answers the lines, ending in /v1.",
        pattern=r"^https?://[^/]+.*",
    )
    upstream_api_key: SecretStr | None = Field(default=None, description="Sent to the upstream as a bearer token.")
    admin_token: SecretStr | None = Field(default=None, description="Opens /metrics to other machines.")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("*",), description="Origins that browsers may call from, separated by commas."
    )

    max_concurrency: int = Field(default=64, ge=1, description="Most lines in flight to one upstream, per process.")
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

    header_timeout_seconds: float = Field(
        default=15, gt=0, description="Time in which a request's headers must be complete."
    )
    body_timeout_seconds: float = Field(default=30, gt=0, description="Longest stall of a request's body.")

    @field_validator("cors_origins", "batch_endpoints", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

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
