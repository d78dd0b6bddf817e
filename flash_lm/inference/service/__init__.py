"""The web service: a page and a JSON API around the running batch."""
