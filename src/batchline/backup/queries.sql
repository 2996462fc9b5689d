-- name: marks
-- How far files and segments are numbered; what is added later has a higher number.
SELECT (SELECT coalesce(max(seq), 0) FROM files) AS file, (SELECT coalesce(max(id), 0) FROM segments) AS segment;

-- name: file_objects
SELECT object_key FROM files WHERE seq > :file AND state = 'stored';

-- name: work_objects
SELECT work_key AS object_key FROM batches
WHERE work_key IS NOT NULL AND status IN ('in_progress', 'finalizing', 'cancelling');

-- name: segment_objects
SELECT segments.object_key FROM segments JOIN batches ON batches.id = segments.batch_id
WHERE segments.id > :segment AND segments.object_key IS NOT NULL
    AND batches.status IN ('in_progress', 'finalizing', 'cancelling');

-- name: counts
SELECT (SELECT count(*) FROM batches) AS batches,
    (SELECT count(*) FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
        AS open_batches,
    (SELECT count(*) FROM files WHERE state = 'stored') AS files;

-- name: numbers
-- The last number given in each order that has to be gone on with.
SELECT 'files' AS name, 'seq' AS number, (SELECT max(seq) FROM files) AS last
UNION ALL SELECT 'batches', 'seq', (SELECT seq FROM sqlite_sequence WHERE name = 'batches')
UNION ALL SELECT 'ledger', 'id', (SELECT seq FROM sqlite_sequence WHERE name = 'ledger')
UNION ALL SELECT 'segments', 'id', (SELECT seq FROM sqlite_sequence WHERE name = 'segments');

-- name: organizations
SELECT * FROM organizations;

-- name: projects
SELECT * FROM projects;

-- name: keys
SELECT * FROM keys;

-- name: ledger
SELECT * FROM ledger;

-- name: metering
SELECT * FROM metering;

-- name: files
SELECT * FROM files;

-- name: batches
SELECT * FROM batches;

-- name: shards
-- PostgreSQL also has the length of a lease, which none of these has.
SELECT * FROM shards;

-- name: lanes
-- PostgreSQL also keeps what is next in a lane; SQLite looks it up.
SELECT lanes.project_id, lanes.model, lanes.virtual_time, first.expires_at AS next_expires_at,
    first.batch_id AS next_batch_id, first.n AS next_n, 1 AS open
FROM lanes JOIN shards AS first ON (first.batch_id, first.n) = (
    SELECT batch_id, n FROM shards
    WHERE state = 'open' AND shards.project_id = lanes.project_id AND shards.model = lanes.model
    ORDER BY expires_at, batch_id, n LIMIT 1
);

-- name: segments
SELECT * FROM segments;

-- name: line_errors
SELECT * FROM line_errors;

-- name: samples
SELECT * FROM samples;
