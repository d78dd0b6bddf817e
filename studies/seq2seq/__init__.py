"""The study of prefixes, cross attention and encoders."""
