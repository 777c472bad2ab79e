"""`fovea doctor`: makes the checks of `fovea.doctor`, and hands them what they need of the other rooms."""

from fovea.cli.doctor.command import register

__all__ = ["register"]
