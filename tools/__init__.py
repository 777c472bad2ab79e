"""Tools for developers, not a part of the package."""
