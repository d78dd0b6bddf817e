"""The controls of the study: what a reviewer asks for first. Its design is studies/controls/README.md."""
