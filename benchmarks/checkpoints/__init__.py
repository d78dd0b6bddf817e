"""What saving costs, and whether a run survives being killed."""
