"""Vision encoders: from the pixels of an image to the rows that replace its visual tokens in the decoder."""
