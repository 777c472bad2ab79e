"""The engine without a model: the real scheduler over steps whose duration a formula tells.

- `executor`: carries out plans without a model, on a virtual clock or in real time.
- `assemble`: puts the scheduler, the caches and an executor together.
- `run`: serves a trace on a virtual clock; `report` is the result.
- `fleet`: several engines on one clock, some of which may only encode images.
- `serving`: an engine client in real time, for servers.
"""
