"""Training sequences written by the target itself."""
