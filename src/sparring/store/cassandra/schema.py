"""The tables of a store on Cassandra, and every statement about them. `cassandra_store` says what they mean."""

__all__ = ["SCHEMA", "STATEMENTS", "TABLES", "VERSION"]

VERSION = 3  # of the tables; older ones: see `migration`
SCHEMA = (  # {compression} is the address's
    "CREATE TABLE IF NOT EXISTS version (key text PRIMARY KEY, version int)",
    # key: what all other tables call the game. A name that is declared again after its game was deleted gets another.
    # deleted: what is left of one that was not declared again.
    "CREATE TABLE IF NOT EXISTS game (name text PRIMARY KEY, spec text, key text, paused boolean, deleted boolean)",
    "CREATE TABLE IF NOT EXISTS bucket (game text, bucket int, day int, PRIMARY KEY (game, bucket))",
    """CREATE TABLE IF NOT EXISTS head (
        game text, bucket int, steps bigint, fragments int, bytes bigint, closed boolean,
        PRIMARY KEY ((game, bucket)))""",
    # Fragments, some in a row: Cassandra's work is by the row more than by the byte.
    """CREATE TABLE IF NOT EXISTS block (
        game text, day int, bucket int, place bigint, body blob, PRIMARY KEY ((game, day, bucket), place))
        WITH compression = {{'class': '{compression}'}}""",
    # What a commit held, without the columns: a row per commit.
    """CREATE TABLE IF NOT EXISTS record (
        game text, day int, bucket int, place bigint, time double, parts blob,
        PRIMARY KEY ((game, day, bucket), place)) WITH compression = {{'class': '{compression}'}}""",
    # place: see `rows.Place`; player: a digest; checksum: of the content; none: it was erased.
    """CREATE TABLE IF NOT EXISTS claims (
        shard bigint, id blob, place blob, player blob, checksum bigint, PRIMARY KEY (shard, id, place, player))""",
    """CREATE TABLE IF NOT EXISTS merge (
        game text, epoch int, at bigint, entry blob, PRIMARY KEY ((game, epoch), at))""",
    "CREATE TABLE IF NOT EXISTS erasure (game text PRIMARY KEY, mark uuid)",
    """CREATE TABLE IF NOT EXISTS quarantine (
        game text, writer uuid, slot int, time double, player text, id text, reason text,
        PRIMARY KEY (game, writer, slot)) WITH default_time_to_live = 2592000""",
    "CREATE TABLE IF NOT EXISTS rejected (game text, writer uuid, count bigint, PRIMARY KEY (game, writer))",
)
TABLES = ("game", "bucket", "head", "block", "record", "claims", "merge", "erasure", "quarantine", "rejected")

PARTITION = "game = ? AND day = ? AND bucket = ?"
CLAIM = "shard = ? AND id = ? AND place = ? AND player = ?"
LAST = "USING TIMESTAMP 4611686018427387904"  # after everything, whatever clocks say
# Rows that one owner writes carry small timestamps: no clock decides about them, and any deletion is later.
STATEMENTS = {
    "games": "SELECT name, spec, paused FROM game",
    "game": "SELECT spec, key FROM game WHERE name = ?",
    "register": "UPDATE game SET spec = ?, key = ?, paused = false, deleted = null WHERE name = ? IF spec = null",
    "pause": "UPDATE game SET paused = ? WHERE name = ? IF spec != null",
    "unregister": "UPDATE game SET spec = null WHERE name = ? IF key = ?",
    # That it was deleted is remembered for a year.
    "forget game": "UPDATE game USING TTL 31536000 SET key = null, paused = null, deleted = true WHERE name = ?"
    " IF key = ? AND spec = null",
    "newest bucket": "SELECT bucket FROM bucket WHERE game = ? ORDER BY bucket DESC LIMIT 1",
    "open bucket": "INSERT INTO bucket (game, bucket, day) VALUES (?, ?, ?) IF NOT EXISTS",
    "buckets": "SELECT bucket, day FROM bucket WHERE game = ? AND bucket > ? LIMIT ?",
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
    "quarantined": "SELECT writer, slot, player FROM quarantine WHERE game = ?",
    "release": "DELETE FROM quarantine WHERE game = ? AND writer = ? AND slot = ?",
    "count rejected": "INSERT INTO rejected (game, writer, count) VALUES (?, ?, ?) USING TIMESTAMP ?",
    "rejected": "SELECT count FROM rejected WHERE game = ?",
    # Of a game that is deleted; its key is never used again, so nothing can come after these.
    "drop head": f"DELETE FROM head {LAST} WHERE game = ? AND bucket = ?",
    "drop blocks": f"DELETE FROM block {LAST} WHERE {PARTITION}",
    "drop records": f"DELETE FROM record {LAST} WHERE {PARTITION}",
    "drop merged": f"DELETE FROM merge {LAST} WHERE game = ? AND epoch = ?",
    "drop buckets": f"DELETE FROM bucket {LAST} WHERE game = ?",
    "drop erasure": f"DELETE FROM erasure {LAST} WHERE game = ?",
    "drop quarantine": f"DELETE FROM quarantine {LAST} WHERE game = ?",
    "drop rejected": f"DELETE FROM rejected {LAST} WHERE game = ?",
}
