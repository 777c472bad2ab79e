"""Fewer visual tokens after the encoder: `methods` is what there is to choose from, names and counts without tensors."""
