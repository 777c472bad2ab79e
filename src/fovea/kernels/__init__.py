"""F2: pure tensor functions. `reference` holds the plain twin of every fast one."""
