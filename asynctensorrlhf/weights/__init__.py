"""Published weights for engines to read."""
