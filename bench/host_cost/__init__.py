"""What a token costs the host of a server."""
