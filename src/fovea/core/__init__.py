"""F0: values, protocols, errors and configuration. Standard library only."""
