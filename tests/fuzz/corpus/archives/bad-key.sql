-- sql
UPDATE files SET object_key = '../../x' WHERE seq = 1;
