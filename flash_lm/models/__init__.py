"""The language model and the table of families."""
