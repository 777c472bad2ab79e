"""OpenTelemetry traces: the place of a request in a trace, its spans, and their export over OTLP/HTTP."""
