"""F3: the machine that turns images and text into tokens. Torch lives here, never in the brains.

The brains (config, sequence, prompt, cache/, schedule/) are integers and dataclasses; `runner` is where a plan
becomes tensors.
"""
