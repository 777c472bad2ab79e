"""Attention of prompts on CUDA by the FlashInfer library, if it is installed."""
