"""Sweeps: runs of a grid, and tuning of learning rates."""
