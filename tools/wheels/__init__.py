"""Build and check wheels with compiled kernels: `make wheel`."""
