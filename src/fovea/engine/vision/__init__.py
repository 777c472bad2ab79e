"""From an image to the rows that stand in for it in the language model."""
