"""The service under load, and with hostile clients."""
