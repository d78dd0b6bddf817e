"""What a training step costs, and what stands around it."""
