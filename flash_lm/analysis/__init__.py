"""From results (JSONL) to tables and curves. Imports nothing else of flash_lm, so it reads results of any version."""
