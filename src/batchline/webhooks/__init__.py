"""Sends the events of batches to the URLs that projects chose."""
