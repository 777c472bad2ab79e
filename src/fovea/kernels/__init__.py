"""F2: pure tensor functions that layers call. `reference` holds their naive twins."""
