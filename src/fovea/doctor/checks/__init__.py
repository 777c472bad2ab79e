"""The checks, one file per group."""
