"""Results (JSONL) as tables, curves and pages; imports `runs` and `errors`, and nothing else of the package."""
