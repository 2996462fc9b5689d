-- hold: whether the batch is held, or may be; NULL if it was created without. held_at: since when. output_lifetime: the
-- seconds after which its result files expire, or NULL for as long as all files are kept.
ALTER TABLE batches ADD COLUMN hold TEXT;
ALTER TABLE batches ADD COLUMN held_at INTEGER;
ALTER TABLE batches ADD COLUMN output_lifetime INTEGER;

-- The shards of held batches, which no worker may claim, are withheld.
DROP INDEX shards_unfinished;
CREATE INDEX shards_unfinished ON shards (batch_id) WHERE state IN ('open', 'leased', 'withheld');

-- Usage is summed up by the keys of a project.
CREATE INDEX ledger_of_key ON ledger (key_id, at) WHERE kind = 'usage';

-- Where events of a project are sent. events: their types, separated by commas. by_operator: whether a command made it,
-- which may name this machine. disabled_at: when its receiver said that it is gone.
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    url TEXT NOT NULL,
    events TEXT NOT NULL,
    secret TEXT NOT NULL,
    by_operator INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    disabled_at INTEGER
);
CREATE INDEX webhooks_of_project ON webhooks (project_id);

-- One row for each event and webhook, written by the transaction that ends the batch. state: pending, delivered or
-- failed. next_at: when it is tried next; an attempt under way moves it ahead, so that another process takes over if
-- this one dies. epoch: grows with each attempt, and fences off a late one.
CREATE TABLE deliveries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id TEXT NOT NULL,
    event_id TEXT NOT NULL,
    type TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending',
    epoch INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at INTEGER NOT NULL,
    ended_at INTEGER,
    status INTEGER,
    detail TEXT,
    UNIQUE (webhook_id, event_id)
);
CREATE INDEX deliveries_due ON deliveries (webhook_id, next_at, id) WHERE state = 'pending';
CREATE INDEX deliveries_ended ON deliveries (ended_at) WHERE state <> 'pending';
