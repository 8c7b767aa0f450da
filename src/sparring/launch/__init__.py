"""Where trainings run: nodes of a cluster."""
