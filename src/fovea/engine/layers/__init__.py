"""The layers of all models. Their attribute names are those of the checkpoints, so loading needs no table."""
