-- Money is in nano-units. The ledger entries of an organization sum to its balance and its credits.
CREATE TABLE organizations (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    balance INTEGER NOT NULL DEFAULT 0,
    credits INTEGER NOT NULL DEFAULT 0,
    funded INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE projects (
    id TEXT PRIMARY KEY,
    organization_id TEXT NOT NULL REFERENCES organizations (id),
    name TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (organization_id, name)
);

CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    digest BLOB NOT NULL UNIQUE,
    hint TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_used_at INTEGER,
    revoked_at INTEGER
);

-- Every change of an organization's money. The usage of one key and model in one hour is one entry per batch, and one
-- for synchronous calls, which have no batch.
CREATE TABLE ledger (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    organization_id TEXT NOT NULL REFERENCES organizations (id),
    kind TEXT NOT NULL,
    at INTEGER NOT NULL,
    balance INTEGER NOT NULL,
    credits INTEGER NOT NULL,
    key_id TEXT REFERENCES keys (id),
    batch_id TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    requests INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX ledger_usage ON ledger (key_id, batch_id, model, at) WHERE kind = 'usage';
CREATE INDEX ledger_of_organization ON ledger (organization_id, at);
CREATE INDEX ledger_by_time ON ledger (at) WHERE kind = 'usage';

-- One row: the credits that new organizations start with, or NULL without metering.
CREATE TABLE metering (id INTEGER PRIMARY KEY, free_credits INTEGER);
INSERT INTO metering (id, free_credits) VALUES (1, NULL);

-- seq is assigned when a file becomes visible, so that pages are in the order in which readers could see files.
CREATE TABLE files (
    id TEXT PRIMARY KEY,
    seq INTEGER UNIQUE,
    project_id TEXT NOT NULL REFERENCES projects (id),
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    is_error INTEGER NOT NULL,
    object_key TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    owner TEXT,
    lease_until REAL,
    removed_at INTEGER
);
CREATE INDEX files_of_project ON files (project_id, seq) WHERE state = 'stored';
CREATE INDEX files_by_expiry ON files (expires_at) WHERE state = 'stored';
CREATE INDEX files_uploading ON files (lease_until) WHERE state = 'uploading';

-- drained: no shard is left to run. It saves a look at the shards of every active batch.
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    project_id TEXT NOT NULL REFERENCES projects (id),
    key_id TEXT NOT NULL REFERENCES keys (id),
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    metadata BLOB NOT NULL,
    status TEXT NOT NULL,
    stop TEXT,
    errors BLOB,
    output_file_id TEXT,
    error_file_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    model TEXT,
    work_key TEXT,
    drained INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL,
    owner TEXT,
    lease_until REAL,
    digest BLOB NOT NULL,
    idempotency_key TEXT,
    answer_status INTEGER,
    answer_body BLOB,
    answered INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_of_project ON batches (project_id, seq);
CREATE INDEX batches_by_digest ON batches (key_id, digest, seq);
CREATE UNIQUE INDEX batches_by_idempotency_key ON batches (project_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_validating ON batches (id) WHERE status = 'validating';
CREATE INDEX batches_running ON batches (expires_at) WHERE status = 'in_progress' AND stop IS NULL AND drained = 0;
CREATE INDEX batches_to_finish ON batches (expires_at)
    WHERE drained = 1 AND status IN ('in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_with_work ON batches (seq)
    WHERE work_key IS NOT NULL AND status IN ('completed', 'expired', 'cancelled');

CREATE TABLE shards (
    batch_id TEXT NOT NULL REFERENCES batches (id),
    n INTEGER NOT NULL,
    project_id TEXT NOT NULL REFERENCES projects (id),
    "offset" INTEGER NOT NULL,
    length INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    model TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    settled BLOB NOT NULL,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'open',
    epoch INTEGER NOT NULL DEFAULT 0,
    strikes INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    lease_until REAL,
    PRIMARY KEY (batch_id, n)
) WITHOUT ROWID;
CREATE INDEX shards_open ON shards (project_id, model, expires_at, batch_id, n) WHERE state = 'open';
CREATE INDEX shards_leased ON shards (owner, lease_until) WHERE state = 'leased';
CREATE INDEX shards_unfinished ON shards (batch_id) WHERE state IN ('open', 'leased');

-- A lane holds the shards of one project and model. Its virtual time grows with the lines that were claimed from it,
-- and the lane with the least virtual time is claimed from next.
CREATE TABLE lanes (
    project_id TEXT NOT NULL REFERENCES projects (id),
    model TEXT NOT NULL,
    virtual_time INTEGER NOT NULL,
    PRIMARY KEY (project_id, model)
) WITHOUT ROWID;

CREATE TABLE segments (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL REFERENCES batches (id),
    output_bytes INTEGER NOT NULL,
    error_bytes INTEGER NOT NULL,
    object_key TEXT,
    data BLOB
);
CREATE INDEX segments_of_batch ON segments (batch_id, id);

-- The failed lines of a batch by code, with the first of them as a sample. They are kept as long as the batch.
CREATE TABLE line_errors (
    batch_id TEXT NOT NULL REFERENCES batches (id),
    code TEXT NOT NULL,
    count INTEGER NOT NULL,
    sample BLOB NOT NULL,
    PRIMARY KEY (batch_id, code)
) WITHOUT ROWID;

-- The number of lines recorded in each interval of five seconds, for the last few minutes of a batch.
CREATE TABLE samples (
    batch_id TEXT NOT NULL REFERENCES batches (id),
    at INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    PRIMARY KEY (batch_id, at)
) WITHOUT ROWID;

-- The processes of the fleet: the latest report of each, and its reserved share of every cap.
CREATE TABLE processes (
    owner TEXT PRIMARY KEY,
    lease_until REAL NOT NULL,
    report BLOB NOT NULL,
    reserved BLOB NOT NULL
) WITHOUT ROWID;

-- One row that a readiness probe writes, to check that commits succeed.
CREATE TABLE probe (id INTEGER PRIMARY KEY, at REAL NOT NULL);
INSERT INTO probe (id, at) VALUES (1, 0);
