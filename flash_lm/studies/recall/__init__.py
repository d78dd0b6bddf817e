"""Recall of bindings."""
