"""A whole service in one file, and back: taken from SQLite and a folder, put into any of the backends."""
