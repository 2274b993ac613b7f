"""Isolated functions: how good the policies are, and what a cluster of functions would do."""
