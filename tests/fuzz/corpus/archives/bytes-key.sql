-- sql
UPDATE segments SET object_key = x'00ff';
