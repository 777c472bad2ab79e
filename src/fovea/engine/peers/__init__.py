"""Work that another engine does: it encodes images, or computes the keys and values of a prompt.

- `layout`: what two engines must have in common.
- `values`: names of the values that engines hand over.
- `choose`: which of several peers gets a piece of work.
- `client`: asks peers and fetches what they offer.

A peer only saves time. Whatever it does not deliver, is late, or does not fit, is computed here.
"""
