"""Studies of this project: designs, queue, reports and results."""
