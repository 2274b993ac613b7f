"""The engine's loop and what it drives: live requests, pacing, failures, changes of adapters."""
