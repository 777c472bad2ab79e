"""F1: the shapes on the wire, and the way between them and core. No web framework, no tensors."""
