-- sql
DELETE FROM segments;
DELETE FROM files;
