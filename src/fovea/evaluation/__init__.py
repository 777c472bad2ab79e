"""F2: questions with known answers, and how well they were answered. No engine, no tensors."""
