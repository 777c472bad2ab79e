"""Floor F5: the commands. Only this floor connects engine and server."""
