"""Inference: sampling, the decode loop, and everything that generates or scores with a trained model."""
