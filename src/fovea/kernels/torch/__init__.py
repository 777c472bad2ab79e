"""Kernels in plain torch, and in torch with weights packed for oneDNN. They run on every device."""
