"""Transports between processes of several hosts."""
