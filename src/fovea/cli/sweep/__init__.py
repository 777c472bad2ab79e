"""`fovea eval --sweep`: every method of visual-token reduction on the same questions."""
