"""The store on a Cassandra cluster."""

from sparring.store.cassandra.cassandra_store import CassandraStore

__all__ = ["CassandraStore"]
