"""Other libraries: whether they compute the same, and how fast they are."""
