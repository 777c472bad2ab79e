"""Reduction of the number of visual tokens after the encoder.

`visual_budget.methods` lists the methods without tensors, `methods` computes them. `probe` reads the
attention of the encoder and of the decoder, for the methods that need it.
"""
