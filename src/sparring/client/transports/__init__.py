"""How play travels from a game: over HTTP to a gateway, or onto a stream."""
