"""What studies share: jobs, rates and seeds, hypotheses, ratios, verdicts."""
