"""Scheduling: the next step's sequences, and the pages and adapters that they hold."""
