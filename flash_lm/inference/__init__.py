"""Decoding: sampling, the decode loop, text in and text out."""
