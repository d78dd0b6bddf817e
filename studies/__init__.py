"""Studies of this project: their designs, their queue and what came out."""
