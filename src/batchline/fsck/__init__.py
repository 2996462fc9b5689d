"""Checks that everything that is stored agrees: rows, objects, counts, money. Repairs what can be repaired safely."""
