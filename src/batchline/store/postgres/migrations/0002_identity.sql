-- One row: the ids of this database and of the objects that belong to it. Both are NULL until the first start, which
-- writes them beside the objects too. So a copy of a database that was never used is a database of its own.
CREATE TABLE identity (
    id integer PRIMARY KEY CHECK (id = 1),
    database_id text COLLATE "C",
    objects_id text COLLATE "C"
);
INSERT INTO identity (id) VALUES (1);

-- Objects without a row: when a sweep saw each of them first and last.
CREATE TABLE sightings (
    object_key text COLLATE "C" PRIMARY KEY,
    first_at bigint NOT NULL,
    last_at bigint NOT NULL
);
CREATE INDEX sightings_by_time ON sightings (last_at);

-- Ended batches whose work is still stored, in the order of their ends.
DROP INDEX batches_with_work;
CREATE INDEX batches_with_work ON batches (coalesce(completed_at, expired_at, cancelled_at))
    WHERE work_key IS NOT NULL AND status IN ('completed', 'expired', 'cancelled');
