"""`fovea eval --sweep`: compares methods of visual-token reduction on the same questions.

Only cli may import it.
"""
