-- sql
DROP TABLE segments;
