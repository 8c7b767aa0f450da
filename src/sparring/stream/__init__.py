"""Play on a stream: the Kinesis API and producer (light: clients ship them), and the Spark job that empties it."""
