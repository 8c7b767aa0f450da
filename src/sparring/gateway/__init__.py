"""The gateway: the HTTP API of the platform (`app`), one module per group of routes."""
