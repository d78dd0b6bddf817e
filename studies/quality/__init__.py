"""The quality of families at equal tokens and equal time."""
