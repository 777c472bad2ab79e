"""Fewer visual tokens after the encoder. `methods` is what there is to choose from, names and counts without tensors; `registry`
finds who does it, one file per method; `taps` and `probe` look into encoder and decoder for those that need it.
"""
