"""A whole server under load: rate, time to first token and time between tokens."""
