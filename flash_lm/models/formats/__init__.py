"""Formats of other libraries' models, one a file: how each is recognised, its settings, names of arrays and layouts."""
