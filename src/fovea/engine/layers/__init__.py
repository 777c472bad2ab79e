"""The parts that every model is built of. Their attribute names are the checkpoints' own, so loading needs no table."""
