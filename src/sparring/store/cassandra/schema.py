"""The tables of a store on Cassandra, and every statement about them. `cassandra_store` says what they mean."""

__all__ = ["GAME_TABLES", "SCHEMA", "STATEMENTS", "VERSION"]

VERSION = 3  # of the tables; older ones: see `migration`
COMPRESSED = "WITH compression = {{'class': '{compression}'}}"  # as the address says
SCHEMA = {
    "version": "(key text PRIMARY KEY, version int)",
    # key: what all other tables call the game. A name that is declared again after its game was deleted gets another.
    # deleted: what is left of one that was not declared again.
    "game": "(name text PRIMARY KEY, spec text, key text, paused boolean, deleted boolean)",
    "bucket": "(game text, bucket int, day int, PRIMARY KEY (game, bucket))",
    "head": "(game text, bucket int, steps bigint, fragments int, bytes bigint, closed boolean,"
    " PRIMARY KEY ((game, bucket)))",
    # Fragments, some in a row: Cassandra's work is by the row more than by the byte.
    "block": "(game text, day int, bucket int, place bigint, body blob, PRIMARY KEY ((game, day, bucket), place))"
    f" {COMPRESSED}",
    # What a commit held, without the columns: a row per commit.
    "record": "(game text, day int, bucket int, place bigint, time double, parts blob,"
    f" PRIMARY KEY ((game, day, bucket), place)) {COMPRESSED}",
    # place: see `rows.Place`; player: a digest; checksum: of the content; none: it was erased.
    "claims": "(shard bigint, id blob, place blob, player blob, checksum bigint,"
    " PRIMARY KEY (shard, id, place, player))",
    "merge": "(game text, epoch int, at bigint, entry blob, PRIMARY KEY ((game, epoch), at))",
    "erasure": "(game text PRIMARY KEY, mark uuid)",
    "quarantine": "(game text, writer uuid, slot int, time double, player text, id text, reason text,"
    " PRIMARY KEY (game, writer, slot)) WITH default_time_to_live = 2592000",
    "rejected": "(game text, writer uuid, count bigint, PRIMARY KEY (game, writer))",
}

GAME_TABLES = ("bucket", "erasure", "quarantine", "rejected")  # of which a game has one partition

PARTITION = "game = ? AND day = ? AND bucket = ?"
CLAIM = "shard = ? AND id = ? AND place = ? AND player = ?"
LAST = "USING TIMESTAMP 4611686018427387904"  # after everything, whatever clocks say
# Rows that one owner writes carry small timestamps: no clock decides about them, and any deletion is later.
STATEMENTS = {
    "games": "SELECT name, spec, paused FROM game",
    "game": "SELECT spec, key FROM game WHERE name = ?",
    "register": "UPDATE game SET spec = ?, key = ?, paused = false, deleted = null WHERE name = ? IF spec = null",
    "revise": "UPDATE game SET spec = ? WHERE name = ? IF spec = ?",
    "pause": "UPDATE game SET paused = ? WHERE name = ? IF spec != null",
    "unregister": "UPDATE game SET spec = null WHERE name = ? IF key = ?",
    # That it was deleted is remembered for a year.
    "forget game": "UPDATE game USING TTL 31536000 SET key = null, paused = null, deleted = true WHERE name = ?"
    " IF key = ? AND spec = null",
    "newest bucket": "SELECT bucket FROM bucket WHERE game = ? ORDER BY bucket DESC LIMIT 1",
    "open bucket": "INSERT INTO bucket (game, bucket, day) VALUES (?, ?, ?) IF NOT EXISTS",
    "buckets": "SELECT bucket, day FROM bucket WHERE game = ? AND bucket > ?",
    "heads": "SELECT bucket, steps, fragments, bytes, closed FROM head WHERE game = ? AND bucket IN ?",
    "advance": "UPDATE head SET steps = ?, fragments = ?, bytes = ?, closed = ? WHERE game = ? AND bucket = ?"
    " IF steps = ? AND closed = ?",
    "put": "INSERT INTO block (game, day, bucket, place, body) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP 1",
    "blocks": f"SELECT place, body FROM block WHERE {PARTITION} AND place > ? AND place <= ?",
    "block": f"SELECT body FROM block WHERE {PARTITION} AND place > ? AND place <= ? LIMIT 1",
    "replace": f"UPDATE block SET body = ? WHERE {PARTITION} AND place = ? IF body = ?",
    "put record": "INSERT INTO record (game, day, bucket, place, time, parts) VALUES (?, ?, ?, ?, ?, ?)"
    " USING TIMESTAMP 1",
    "replace record": f"UPDATE record SET parts = ? WHERE {PARTITION} AND place = ? IF parts = ?",
    "records": f"SELECT place, time, parts FROM record WHERE {PARTITION} AND place > ? AND place <= ?",
    "record": f"SELECT place, time, parts FROM record WHERE {PARTITION} AND place > ? LIMIT 1",
    "claim": "INSERT INTO claims (shard, id, place, player, checksum) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP 1",
    "withdraw": f"DELETE FROM claims USING TIMESTAMP 2 WHERE {CLAIM}",
    "claims": "SELECT id, place, player, checksum FROM claims WHERE shard = ? AND id IN ?",
    "erase claim": f"UPDATE claims {LAST} SET checksum = null WHERE {CLAIM}",
    "delete claim": f"DELETE FROM claims {LAST} WHERE {CLAIM}",
    "merged": "SELECT entry FROM merge WHERE game = ? AND epoch = ? AND at >= ? LIMIT ?",
    "merged before": "SELECT entry FROM merge WHERE game = ? AND epoch = ? AND at <= ? ORDER BY at DESC LIMIT 1",
    "merge": "INSERT INTO merge (game, epoch, at, entry) VALUES (?, ?, ?, ?) IF NOT EXISTS",
    "erasure": "SELECT mark FROM erasure WHERE game = ?",
    "mark erasure": "INSERT INTO erasure (game, mark) VALUES (?, ?)",
    "quarantine": "INSERT INTO quarantine (game, writer, slot, time, player, id, reason) VALUES (?, ?, ?, ?, ?, ?, ?)",
    "quarantined": "SELECT writer, slot, player, id, reason, time FROM quarantine WHERE game = ?",
    "release": "DELETE FROM quarantine WHERE game = ? AND writer = ? AND slot = ?",
    "count rejected": "INSERT INTO rejected (game, writer, count) VALUES (?, ?, ?) USING TIMESTAMP ?",
    "rejected": "SELECT count FROM rejected WHERE game = ?",
    # Of a game that is deleted; its key is never used again, so nothing can come after these.
    "drop head": f"DELETE FROM head {LAST} WHERE game = ? AND bucket = ?",
    "drop blocks": f"DELETE FROM block {LAST} WHERE {PARTITION}",
    "drop records": f"DELETE FROM record {LAST} WHERE {PARTITION}",
    "drop merged": f"DELETE FROM merge {LAST} WHERE game = ? AND epoch = ?",
    **{f"drop {table}": f"DELETE FROM {table} {LAST} WHERE game = ?" for table in GAME_TABLES},
}
