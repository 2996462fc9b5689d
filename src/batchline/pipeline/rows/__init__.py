"""Turns the rows of a table into the requests of a batch: a template is filled with the columns of each row."""
