"""Reduction of the number of visual tokens after the encoder.

`visual_budget.methods` lists the methods without tensors. `registry` finds the function of a method; there is
one file per method. `taps` and `probe` read the attention of the encoder and of the decoder, for the methods
that need it.
"""
