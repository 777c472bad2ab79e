"""F5: the only place that wires things together."""
