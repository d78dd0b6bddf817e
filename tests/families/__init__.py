"""What the tests know of each family: its oracle, closed forms of its size and FLOPs, and how it differs from most."""
