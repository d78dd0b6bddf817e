"""Results (JSONL) as tables, curves and pages; imports `runs` and nothing else of the package."""
