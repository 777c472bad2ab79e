"""F1: what operators see."""
