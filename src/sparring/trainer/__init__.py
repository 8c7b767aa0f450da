"""The live trainer: learns from stored play, one game after the other, and publishes."""
