"""Seeing more where it matters: which parts of an image deserve how many visual tokens, for one question.

Texture, three ways of knowing, their balance, a budget for every region, and where each token stands. Numpy throughout:
the engine brings the model's part (features of a thumbnail, embeddings of the question) and encodes what is chosen.
"""
