"""Programs that are compiled for a chip and read, not run."""
