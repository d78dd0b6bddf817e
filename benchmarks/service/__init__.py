"""The service under load, and beside hostile clients."""
