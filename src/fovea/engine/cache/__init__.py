"""What is kept so that it is not computed twice. A miss recomputes: nothing here is load-bearing."""
