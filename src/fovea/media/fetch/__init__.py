"""Downloads of media over HTTP, with a cache. It must not import torch or the engine."""
