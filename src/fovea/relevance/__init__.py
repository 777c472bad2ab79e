"""Divides a budget of visual tokens among the parts of an image, by their relevance for one question.

The steps are: texture, three ways of knowing, their balance, a budget for every region, and a position for
every token. All of it is numpy. The engine adds the model's part (features of a thumbnail, embeddings of the
question), and encodes the parts that are chosen.
"""
