-- max_cost: the nano-units that a batch may cost, or NULL without a limit. reuse: how far a batch that was created with
-- reuse is, or NULL. sent_as: how the models of its lines are sent to their upstreams, where that is not as they are.
ALTER TABLE batches ADD COLUMN max_cost bigint;
ALTER TABLE batches ADD COLUMN reuse text COLLATE "C";
ALTER TABLE batches ADD COLUMN sent_as bytea;

-- reused: the lines that took an earlier answer. saved: what they would have cost.
ALTER TABLE ledger ADD COLUMN reused bigint NOT NULL DEFAULT 0;
ALTER TABLE ledger ADD COLUMN saved bigint NOT NULL DEFAULT 0;

-- The digests of the lines that a batch has answers for, and where these are in its output file. A small index is kept in
-- its row, a larger one as an object. It can be made again from the files of the batch.
CREATE TABLE reuse_indexes (
    batch_id text COLLATE "C" PRIMARY KEY,
    lines bigint NOT NULL,
    size bigint NOT NULL,
    checksum bigint NOT NULL,
    object_key text COLLATE "C" UNIQUE,
    data bytea
);
