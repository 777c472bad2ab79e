"""An engine in a process of its own, so that it and the HTTP server do not share one Python lock (GIL).

- `client`: the server's side, an `EngineClient`. It starts the process. It must not import torch.
- `host`: the engine's side, the process itself.
- `messages`: the messages between the two.
- `road`: how pixels travel.
- `sources`: what the process loads.
"""
