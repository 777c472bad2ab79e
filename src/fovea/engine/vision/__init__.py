"""Vision encoders: from pixels to the rows of visual tokens. It must not import transformers."""
