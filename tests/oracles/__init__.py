"""Reference implementations in float64 NumPy: loops over tokens and pairs, written from the papers' equations alone.

They take one sequence at a time: arrays are L×…, in the letters of flash_lm/ops/__init__.py. They are slow, and easy
to compare with the paper. Parameters are nested dicts with the model's names.
"""
