"""References in float64 NumPy: loops over tokens and pairs, written from the papers' equations and from nothing else.

One row of a batch at a time: arrays are L×…, in the letters of flash_lm/ops/__init__.py. Slow, and easy to read beside
the paper. Parameters arrive as nested dicts in the model's names.
"""
