"""The alerts, one file per subject."""
