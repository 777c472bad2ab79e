"""Decisions about detail levels and numbers of visual tokens. It must not import torch."""
