"""Playing to learn: actors, the processes they run in, and the clusters those run on."""
