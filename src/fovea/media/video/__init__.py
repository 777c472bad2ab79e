"""Videos: containers, and the decoding of frames. It must not import torch or the engine."""
