"""The engine, which turns images and text into tokens. It must not import server, cli or bench.

Its brains are integers and dataclasses, and must not import torch: config, cache, kv, request, schedule,
step, simulate, visual_budget and vision.processor. `execute.runner` turns step plans into tensors.
"""
