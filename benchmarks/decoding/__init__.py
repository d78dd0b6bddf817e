"""What a token costs when a model decodes."""
