"""Flax NNX modules: sublayers, the attention cores inside them, norms and positions.

A sublayer (see `sublayer.Sublayer`) is a projection around an attention core, or a feed-forward. Cores and projections
are independent of each other, so each pair of them makes a family.
"""
