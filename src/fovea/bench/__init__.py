"""A load generator for OpenAI-compatible servers, which reaches them only over HTTP.

No module here imports an engine, a server or torch. Every server therefore gets the same requests from the
same client.
"""
