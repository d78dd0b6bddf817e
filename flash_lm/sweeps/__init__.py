"""Sweeps: grids of runs, and tuning of a key by successive halving."""
