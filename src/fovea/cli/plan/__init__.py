"""fovea plan: predictions before anything is bought or loaded."""

from fovea.cli.plan.command import register

__all__ = ["register"]
