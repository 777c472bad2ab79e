"""Keys, the limits of their clients, and the logs about who asked for what."""
