"""Fovea on Ray: the only package that imports Ray. Needs the extra `cluster`."""
