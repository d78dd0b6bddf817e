"""Shared by the commands: flags, config files, error messages."""
