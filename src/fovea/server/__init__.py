"""F4: the OpenAI-compatible server, over any EngineClient."""
