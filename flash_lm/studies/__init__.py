"""This project's own studies."""
