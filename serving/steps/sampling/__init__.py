"""The next tokens of a step on the device; masks of rows that a grammar binds."""
