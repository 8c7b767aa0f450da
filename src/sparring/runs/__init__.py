"""A run: its directory, checkpoints, metrics, figures, videos and its view in the terminal."""
