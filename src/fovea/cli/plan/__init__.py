"""fovea plan."""
