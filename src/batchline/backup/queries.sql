-- name: marks
-- The highest numbers of files and segments; those that are added later get higher ones.
SELECT (SELECT coalesce(max(seq), 0) FROM files) AS file, (SELECT coalesce(max(id), 0) FROM segments) AS segment;

-- name: file_objects
-- The objects of files that were added after the mark.
SELECT object_key FROM files WHERE seq > :file AND state = 'stored';

-- name: work_objects
-- The work files of batches that still need them.
SELECT work_key AS object_key FROM batches
WHERE work_key IS NOT NULL AND status IN ('in_progress', 'finalizing', 'cancelling');

-- name: segment_objects
-- The objects of segments that were added after the mark, of batches that still need them.
SELECT segments.object_key FROM segments JOIN batches ON batches.id = segments.batch_id
WHERE segments.id > :segment AND segments.object_key IS NOT NULL
    AND batches.status IN ('in_progress', 'finalizing', 'cancelling');

-- name: all_keys
-- Every key of an object that a row names.
SELECT object_key FROM files
UNION ALL SELECT work_key FROM batches WHERE work_key IS NOT NULL
UNION ALL SELECT object_key FROM segments WHERE object_key IS NOT NULL;

-- name: foreign_schema
-- Finds something that runs statements of its own, or that hides what a name stands for.
SELECT CASE WHEN type = 'table' THEN 'virtual table' ELSE type END AS type, name FROM sqlite_schema
WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%' LIMIT 1;

-- name: counts
-- The numbers that the manifest shows.
SELECT (SELECT count(*) FROM batches) AS batches,
    (SELECT count(*) FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
        AS open_batches,
    (SELECT count(*) FROM files WHERE state = 'stored') AS files;

-- name: numbers
-- The last number of each sequence, after which the restored database must continue.
SELECT 'files' AS name, 'seq' AS number, (SELECT max(seq) FROM files) AS last
UNION ALL SELECT 'batches', 'seq', (SELECT seq FROM sqlite_sequence WHERE name = 'batches')
UNION ALL SELECT 'ledger', 'id', (SELECT seq FROM sqlite_sequence WHERE name = 'ledger')
UNION ALL SELECT 'segments', 'id', (SELECT seq FROM sqlite_sequence WHERE name = 'segments')
UNION ALL SELECT 'deliveries', 'id', (SELECT seq FROM sqlite_sequence WHERE name = 'deliveries');

-- name: name_database
-- Stores the id of the database.
UPDATE identity SET database_id = :database_id;

-- name: bind_objects
-- Stores the id of the objects.
UPDATE identity SET objects_id = :objects_id;

-- name: organizations
-- Every row, as in the queries below, with the columns that PostgreSQL has too.
SELECT * FROM organizations;

-- name: projects
-- Every row.
SELECT * FROM projects;

-- name: keys
-- Every row.
SELECT * FROM keys;

-- name: ledger
-- Every row.
SELECT * FROM ledger;

-- name: metering
-- Every row.
SELECT * FROM metering;

-- name: files
-- Every row.
SELECT * FROM files;

-- name: batches
-- Every row.
SELECT * FROM batches;

-- name: shards
-- PostgreSQL also has the length of a lease; no shard of a backup has a lease.
SELECT * FROM shards;

-- name: lanes
-- PostgreSQL also stores the next shard of a lane, which SQLite looks up.
SELECT lanes.project_id, lanes.model, lanes.virtual_time, first.expires_at AS next_expires_at,
    first.batch_id AS next_batch_id, first.n AS next_n, 1 AS open
FROM lanes JOIN shards AS first ON (first.batch_id, first.n) = (
    SELECT batch_id, n FROM shards
    WHERE state = 'open' AND shards.project_id = lanes.project_id AND shards.model = lanes.model
    ORDER BY expires_at, batch_id, n LIMIT 1
);

-- name: segments
-- Every row.
SELECT * FROM segments;

-- name: line_errors
-- Every row.
SELECT * FROM line_errors;

-- name: result_orders
-- Every row.
SELECT * FROM result_orders;

-- name: samples
-- Every row.
SELECT * FROM samples;

-- name: webhooks
-- Every row.
SELECT * FROM webhooks;

-- name: deliveries
-- Every row.
SELECT * FROM deliveries;
