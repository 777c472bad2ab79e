"""A gateway in front of OpenAI-compatible engines: routing by images, tenants, caches, fallbacks."""
