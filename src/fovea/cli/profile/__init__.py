from fovea.cli.profile.command import register

__all__ = ["register"]
