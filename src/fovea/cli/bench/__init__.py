from fovea.cli.bench.command import register

__all__ = ["register"]
