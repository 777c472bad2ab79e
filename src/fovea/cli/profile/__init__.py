"""`fovea profile`: shows where the time of requests goes. Only cli may import it."""

from fovea.cli.profile.command import register

__all__ = ["register"]
