"""Scheduling: the sequences and images of the next step, as a plan. It must not import torch."""
