"""Corpora of examples that a rule draws: the options, the generator and the row of each in one file."""
