-- max_cost: the nano-units that a batch may cost, or NULL without a limit. reuse: how far a batch that was created with
-- reuse is, or NULL. sent_as: how the models of its lines are sent to their upstreams, where that is not as they are.
ALTER TABLE batches ADD COLUMN max_cost INTEGER;
ALTER TABLE batches ADD COLUMN reuse TEXT;
ALTER TABLE batches ADD COLUMN sent_as BLOB;

-- reused: the lines that took an earlier answer. saved: what they would have cost.
ALTER TABLE ledger ADD COLUMN reused INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ledger ADD COLUMN saved INTEGER NOT NULL DEFAULT 0;

-- The digests of the lines that a batch has answers for, and where these are in its output file. A small index is kept in
-- its row, a larger one as an object. It can be made again from the files of the batch.
CREATE TABLE reuse_indexes (
    batch_id TEXT PRIMARY KEY,
    lines INTEGER NOT NULL,
    size INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    object_key TEXT UNIQUE,
    data BLOB
) WITHOUT ROWID;
