"""Floor F1: metrics for operators, and profiles of where time goes."""
