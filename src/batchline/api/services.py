"""Holds the services that the routes call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.check import InputCheck
from batchline.pipeline.create import BatchCreator
from batchline.pipeline.download import Download
from batchline.pipeline.identity import IdentityCheck
from batchline.pipeline.inference import Inference
from batchline.pipeline.line_search import LineSearch
from batchline.pipeline.line_table import LineTable
from batchline.pipeline.load_history import LoadHistory
from batchline.pipeline.merge import Merger
from batchline.pipeline.overview import UpstreamsReader
from batchline.pipeline.progress import ProgressReader
from batchline.pipeline.release import HoldRelease
from batchline.pipeline.rerun import Rerun
from batchline.pipeline.results import ResultReader
from batchline.pipeline.rows.conversion import TableConversion
from batchline.pipeline.storage_quota import StorageQuota
from batchline.pipeline.upload import Upload
from batchline.ports import Objects, Random, Store, SyncUpstream, WatchedClock
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class ApiServices:
    """Everything that the application is built from."""

    settings: Settings
    store: Store
    objects: Objects
    identity: IdentityCheck
    upload: Upload
    storage_quota: StorageQuota
    download: Download
    creator: BatchCreator
    rerun: Rerun
    results: ResultReader
    merger: Merger
    line_table: LineTable
    line_search: LineSearch
    input_check: InputCheck
    table_conversion: TableConversion
    cancellation: Cancellation
    hold_release: HoldRelease
    progress_reader: ProgressReader
    load_history: LoadHistory
    upstreams_reader: UpstreamsReader
    inference: Inference
    upstreams: Mapping[str, SyncUpstream]
    on_key_used: Callable[[str], None]
    """Called with the id of every key that authenticated."""
    metrics: Metrics
    clock: WatchedClock
    random: Random
