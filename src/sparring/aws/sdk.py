"""AWS credentials for servers and launchers: everything that AWS's own tools know (SSO, assumed roles, programs, web
identities, containers, instances), by botocore's chain, which the extra `sparring[aws]` brings. Without it the small
chain of `credentials` serves, and names what it does not know. A game's client never comes here."""

import importlib.util
import threading
from concurrent.futures import Future

from sparring.aws import credentials as chain
from sparring.aws.credentials import CredentialsError
from sparring.aws.sign import Credentials
from sparring.errors import InputError

__all__ = ["credentials"]

LIMIT = 60.0  # seconds: a program that is asked for credentials may hang
LASTING = 300.0  # seconds until credentials that do not expire are looked up again


def credentials() -> Credentials | None:
    """As `credentials.credentials`."""
    return chain.credentials() if importlib.util.find_spec("botocore") is None else _kept()


_asked: "Future[Credentials | None] | None" = None  # one at a time: _kept has a lock


def _find() -> Credentials | None:
    global _asked
    if _asked is None:
        _asked = Future()
        threading.Thread(target=_answer, args=(_asked,), name="sparring-aws", daemon=True).start()
    try:
        return _asked.result(LIMIT)
    except TimeoutError:
        raise CredentialsError(f"AWS credentials were not found within {LIMIT:g} s, and are still waited for") from None
    finally:
        if _asked.done():
            _asked = None


def _answer(asked: "Future[Credentials | None]") -> None:
    try:
        asked.set_result(_resolve())
    except BaseException as error:  # noqa: BLE001  # whoever waits gets the error
        asked.set_exception(error)


def _resolve() -> Credentials | None:
    from botocore.credentials import RefreshableCredentials
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        CredentialRetrievalError,
        HTTPClientError,
        MetadataRetrievalError,
        SSOError,
        TokenRetrievalError,
    )
    from botocore.session import Session

    away = (ConnectionError, HTTPClientError, MetadataRetrievalError, CredentialRetrievalError)
    try:
        session = Session()  # a new one each time: it would keep what it read
        if (region := chain.region()) is not None:
            session.set_config_variable("region", region)  # botocore knows AWS_DEFAULT_REGION alone
        found = session.get_credentials()
        if found is None:
            return None
        plain = found.get_frozen_credentials()
    except away as error:
        program = isinstance(error, CredentialRetrievalError) and error.kwargs.get("provider") == "custom-process"
        raise (InputError if program else CredentialsError)(f"no AWS credentials: {error}") from error
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        kind = InputError if 400 <= status < 500 and status != 429 else CredentialsError
        raise kind(f"no AWS credentials: {error}") from error
    except (SSOError, TokenRetrievalError) as error:
        raise InputError(f"no AWS credentials: {error}. `aws sso login` signs in") from error
    except EOFError as error:
        raise InputError("no AWS credentials: the profile wants an MFA code, and there is nobody to type it") from error
    except (BotoCoreError, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"no AWS credentials: {error}") from error
    # botocore tells nobody when they expire; the AWS CLI, which has to know as well, looks here, too.
    expires = found._expiry_time.timestamp() if isinstance(found, RefreshableCredentials) else None
    return Credentials(plain.access_key, plain.secret_key, plain.token, expires)


_kept = chain.Kept(_find, LASTING)
