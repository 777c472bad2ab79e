"""`fovea bench`: measures a server by the load generator of `fovea.bench`. Only cli may import it."""

from fovea.cli.bench.command import register

__all__ = ["register"]
