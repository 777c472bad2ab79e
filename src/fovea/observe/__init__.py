"""Metrics for operators, and profiles of where time goes."""
