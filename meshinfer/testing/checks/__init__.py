"""The checks, one file per theme."""
