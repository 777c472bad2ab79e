"""Connections: how many, how long, how large their headers, before any route or key is looked at."""
