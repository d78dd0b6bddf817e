"""What a training step on many devices sends and holds."""
