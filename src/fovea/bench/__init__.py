"""A load generator for OpenAI-compatible servers: it knows engines only over HTTP.

It refuses to know what serves: no module here imports an engine, a server or torch, so every server is asked the same
questions by the same client.
"""
