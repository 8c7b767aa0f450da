"""The gateway's operations."""
