-- name: what people call the key. scopes: what it may be used for, sorted and separated by commas; an earlier version's
-- keys may be used for everything. expires_at: when it stops being valid, or NULL if it never does.
ALTER TABLE keys ADD COLUMN name TEXT NOT NULL DEFAULT '';
ALTER TABLE keys ADD COLUMN scopes TEXT NOT NULL DEFAULT 'batch,inference,read';
ALTER TABLE keys ADD COLUMN expires_at INTEGER;
