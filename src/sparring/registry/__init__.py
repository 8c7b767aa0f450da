"""Published models: immutable versions on a directory or an object store."""
