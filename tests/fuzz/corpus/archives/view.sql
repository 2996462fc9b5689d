-- sql
DROP TABLE samples;
CREATE VIEW samples AS SELECT * FROM files;
