"""Questions with known answers, and the scores of a model's answers, without engine or tensors."""
