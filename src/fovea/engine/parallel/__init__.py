"""One model on several devices: its layers are divided among processes, which compute every step together."""
