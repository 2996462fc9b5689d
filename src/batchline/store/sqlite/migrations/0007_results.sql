-- layout: which lines a segment has, and how long each is; NULL if an earlier version recorded it. A segment that a
-- repair emptied has only its layout: its lines were recorded again, and keep their place in the order of the results.
ALTER TABLE segments ADD COLUMN layout BLOB;

-- The order in which the lines of a batch's result files were recorded.
CREATE TABLE result_orders (batch_id TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;

-- The batch whose failed lines this batch runs again.
ALTER TABLE batches ADD COLUMN parent_batch_id TEXT;
CREATE INDEX batches_by_parent ON batches (parent_batch_id, seq) WHERE parent_batch_id IS NOT NULL;
