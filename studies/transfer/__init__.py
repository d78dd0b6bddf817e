"""Pretraining and labels."""
