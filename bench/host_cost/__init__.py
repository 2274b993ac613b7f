"""Processor time of a server's host for a token, beside a device that needs none."""
