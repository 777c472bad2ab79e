"""The commands: the top layer, and the only package that connects engine and server."""
