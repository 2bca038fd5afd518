"""What a run tells people: metric and sample files, W&B, the terminal, warnings about its health."""
