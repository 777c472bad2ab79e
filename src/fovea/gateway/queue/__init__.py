"""The fair queue: which waiting request goes to the backends next, and how many may be there at once."""
