-- layout: which lines a segment has, and how long each is; NULL if an earlier version recorded it. A segment that a
-- repair emptied has only its layout: its lines were recorded again, and keep their place in the order of the results.
ALTER TABLE segments ADD COLUMN layout bytea;
ALTER TABLE segments ALTER COLUMN layout SET STORAGE EXTERNAL;

-- The order in which the lines of a batch's result files were recorded.
CREATE TABLE result_orders (batch_id text COLLATE "C" PRIMARY KEY, data bytea NOT NULL);
ALTER TABLE result_orders ALTER COLUMN data SET STORAGE EXTERNAL;

-- The batch whose failed lines this batch runs again.
ALTER TABLE batches ADD COLUMN parent_batch_id text COLLATE "C";
CREATE INDEX batches_by_parent ON batches (parent_batch_id, seq) WHERE parent_batch_id IS NOT NULL;
