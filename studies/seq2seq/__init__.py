"""Prefixes, cross attention and encoders."""
