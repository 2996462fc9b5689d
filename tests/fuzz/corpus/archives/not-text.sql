-- sql
UPDATE files SET object_key = CAST(x'c328' AS TEXT);
