"""Saves a whole service, its SQLite database and its data folder, to one file, and restores it into any backend."""
