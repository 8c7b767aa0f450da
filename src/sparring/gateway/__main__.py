"""`python -m sparring.gateway`: the gateway alone, without a trainer. (`sparring up` runs the whole platform.)"""

import argparse
import logging
from pathlib import Path

from sparring.gateway.app import create_app, serve
from sparring.registry.registry import Registry
from sparring.store import open_store


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sparring.gateway", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".sparring"), help="the directory for store and registry")
    parser.add_argument("--store", help="another store than the directory's: cassandra://HOST/KEYSPACE")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8400, help="0: any free one")
    parser.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="a name to answer to; may be repeated"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    store = open_store(args.store or str(args.data / "store.db"))
    try:
        app = create_app(
            store, Registry(args.data / "registry"), args.data / "trainer", allowed_hosts=args.allowed_host
        )
        serve(app, args.host, args.port, lambda url: print(url, flush=True))
    finally:
        store.close()


if __name__ == "__main__":
    main()
