"""Start, supervise, stop; tickets to prompts; versions; signals."""
