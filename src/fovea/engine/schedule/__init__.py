"""Who computes what in the next step. No tensors: a plan is a value."""
