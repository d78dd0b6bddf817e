"""Flax NNX modules: sublayers, the attention cores inside them, norms and positions.

A sublayer (see `sublayer.Sublayer`) is a projection around an attention core, or a feed-forward. The cores know nothing
of projections, the projections nothing of how tokens are mixed, so each pair of them is a family.
"""
