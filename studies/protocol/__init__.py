"""Code that all studies share: jobs, learning rates and seeds, hypotheses, ratios, verdicts."""
