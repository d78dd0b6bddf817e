"""Timing of training steps and of decoding, in turns on one device."""
