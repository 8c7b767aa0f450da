"""Play to files and back: Parquet, NumPy, CSV, Minari, RLlib's offline files, another store. Docs: docs/data.md."""
