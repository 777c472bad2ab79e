"""Fuzzing of everything that reads data from others: `make fuzz`. Default tests replay the corpus."""
