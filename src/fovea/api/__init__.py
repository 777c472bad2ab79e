"""The wire models of the HTTP API, and their conversion to and from core values.

No web framework, no tensors.
"""
