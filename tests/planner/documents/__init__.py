"""Figures of the design documents about memory, times and costs, beside what the arithmetic gives.

The documents are those that docs/relevance.md names as the origin of Fovea's design. Every figure that
follows from other figures is here, right or wrong. Times and accuracies that somebody measured cannot be
recomputed, so they are not judged.
"""
