"""The trained model: loading, log-probabilities, packing."""
