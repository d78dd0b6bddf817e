"""The commands: flags, config files, one clear line per error."""
