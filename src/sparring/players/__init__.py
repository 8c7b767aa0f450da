"""Mock players."""
