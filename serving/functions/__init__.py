"""Isolated functions over one shared backbone (ServerlessLoRA, arXiv 2505.14468)."""
