"""The engine without a model: the real scheduler over steps whose duration a formula tells.

- `cost`: duration of a step. `benchmarks/fit_cost.py` fits it to a real engine.
- `trace`: requests of a trace as sequences.
- `executor`: carries out plans without a model.
- `run`: serves a trace on a virtual clock; `report` is the result.
- `serving`: an engine client in real time, for servers; `filler` and `bundled` give it answers and prompts.
- `settings`: which engine settings a simulation uses.
"""
