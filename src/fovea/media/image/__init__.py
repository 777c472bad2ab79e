"""Images: header, content identity, decoding, cache. It must not import torch or the engine."""
