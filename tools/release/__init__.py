"""Checks of a release, and its bill of materials."""
