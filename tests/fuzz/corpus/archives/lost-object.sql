-- sql
UPDATE files SET object_key = 'uploads/none' WHERE seq = 1;
