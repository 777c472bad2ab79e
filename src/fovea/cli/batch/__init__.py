"""`fovea batch`: answers a file of questions, or one question about each image of a folder.

Only cli may import it, and only `register` is for others.
"""

from fovea.cli.batch.command import register

__all__ = ["register"]
