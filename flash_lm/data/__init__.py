"""Data pipeline from corpora to batches: text -> tokens in a memory-mapped cache -> packed rows -> batches."""
