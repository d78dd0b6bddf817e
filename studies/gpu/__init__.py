"""Runs of the studies that are made on a GPU: a curve at 25 million parameters, and jobs left in the queue."""
