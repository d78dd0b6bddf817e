"""The scaling study: plans of runs, and fits of a scaling law."""
