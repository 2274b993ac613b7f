"""Structured outputs: grammars that bind an answer, and the token masks they give. No jax."""
