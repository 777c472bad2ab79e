"""Vision encoders that `fovea build` compiled ahead of time, one per grid of patches."""
