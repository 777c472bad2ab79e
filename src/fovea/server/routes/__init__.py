"""Routes of the HTTP API, one file per subject. It must not import the engine."""
