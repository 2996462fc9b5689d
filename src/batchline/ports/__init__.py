"""Defines what the pipeline needs of the outside: small protocols, each with one suite for all implementations."""

from batchline.ports.objects import Objects, Writer
from batchline.ports.runtime import Clock, Random, Threads, Validator, Verdict
from batchline.ports.store import (
    Accounts,
    Batches,
    BatchSignal,
    BatchSnapshot,
    CapSharing,
    Claim,
    CreateRecord,
    Files,
    FinalizeLease,
    Fleet,
    Ledger,
    Mending,
    NewBatch,
    NewKey,
    ShardStore,
    Store,
)
from batchline.ports.upstream import EngineQueue, Stream, SyncUpstream, Tokens, Upstream

__all__ = [
    "Accounts",
    "BatchSignal",
    "BatchSnapshot",
    "Batches",
    "CapSharing",
    "Claim",
    "Clock",
    "CreateRecord",
    "EngineQueue",
    "Files",
    "FinalizeLease",
    "Fleet",
    "Ledger",
    "Mending",
    "NewBatch",
    "NewKey",
    "Objects",
    "Random",
    "ShardStore",
    "Store",
    "Stream",
    "SyncUpstream",
    "Threads",
    "Tokens",
    "Upstream",
    "Validator",
    "Verdict",
    "Writer",
]
