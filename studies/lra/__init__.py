"""The study of small stand-ins for Long Range Arena."""
