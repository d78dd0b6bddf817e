"""The papers' claims."""
