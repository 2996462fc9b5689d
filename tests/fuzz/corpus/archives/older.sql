-- sql
PRAGMA user_version = 3;
