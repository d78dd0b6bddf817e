"""The language model, the table of families and the count of FLOPs."""
