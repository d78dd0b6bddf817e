"""From results (JSONL) to tables and curves. Imports nothing else of flash_lm: it reads results of any version."""
