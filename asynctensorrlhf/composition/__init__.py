"""From a command line to checked jobs: composing, checking and running with Hydra, the only room that knows it."""
