"""Values, protocols, errors and configuration. The package imports the standard library only."""
