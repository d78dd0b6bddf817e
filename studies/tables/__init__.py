"""Reproductions of the papers' tables."""
