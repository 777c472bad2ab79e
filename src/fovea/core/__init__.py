"""Floor F0: values, protocols, errors and configuration. It imports the standard library only."""
