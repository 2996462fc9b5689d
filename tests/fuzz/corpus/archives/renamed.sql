-- sql
ALTER TABLE files RENAME COLUMN object_key TO key;
