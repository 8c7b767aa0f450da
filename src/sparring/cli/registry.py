"""`sparring registry`: the place where models are published, made ready."""

from typing import Annotated

import typer

from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer(help="Where models are published.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Where models are published."""


@app.command(
    epilog="Examples:\n\n  $ sparring registry init 's3://my-bucket/bots?region=eu-west-1' --public\n\n"
    "  $ sparring up --registry 's3://my-bucket/bots?region=eu-west-1'"
)
def init(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="The bucket: s3://BUCKET/PREFIX?region=…, and &endpoint=… if not AWS's."
        ),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody read what is published there, and nothing else.")
    ] = False,
) -> None:
    """Make a bucket ready: create it if there is none and, with --public, open it to games. May be repeated."""
    from sparring.aws.s3 import S3Bucket

    if not address.startswith("s3://"):
        raise InputError(f"{address} is not a bucket (s3://…): a directory needs no preparation")
    for done in S3Bucket.parse(address).init(public):
        typer.echo(done)
