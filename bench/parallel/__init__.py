"""Several devices of one host: exchanges, and later whole steps."""
