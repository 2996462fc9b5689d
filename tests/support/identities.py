"""Provides the check that a store and objects of a test belong together."""

from batchline.pipeline.identity import IdentityCheck
from batchline.ports import Objects, Random, Store
from batchline.system import SystemRandom


def identity_of(store: Store, objects: Objects, random: Random | None = None) -> IdentityCheck:
    return IdentityCheck(
        store=store, objects=objects, random=random or SystemRandom(), database="the database", place="the folder"
    )
