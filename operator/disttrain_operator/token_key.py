"""The key that the tokens of all jobs are derived from: in a file, or in a Secret that the operator makes once.

The Secret is made by whichever replica starts first; the others find it there and read it. It outlives upgrades and
the removal of the chart, so that jobs which run meanwhile keep their tokens.
"""

import asyncio
import base64
import binascii
import logging
import secrets

from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import AccessError, Conflict, KubeError, NotFound
from disttrain_operator.settings import Settings

logger = logging.getLogger(__name__)

MIN_KEY_BYTES = 32
ENTRY = "key"
"""The entry of the Secret's data that holds the key."""
POLL_SECONDS = 1.0
REMINDER_POLLS = 60


def file_or_random_key(settings: Settings) -> bytes | None:
    """Return the key of the file, or a random one; None where a Secret holds it. Raises AccessError for a short key."""
    file = settings.token_key_file
    if file is not None:
        key = file.read_bytes().strip()
        if len(key) < MIN_KEY_BYTES:
            raise AccessError(
                f"--token-key-file {file} holds a key of {len(key)} bytes, and must hold at least {MIN_KEY_BYTES}"
                f" bytes: `openssl rand -hex {MIN_KEY_BYTES} > {file}` makes one"
            )
        return key
    if settings.token_key_secret is not None:
        return None
    logger.info("no --token-key-file and no --token-key-secret: tokens of jobs are made with a random key")
    return secrets.token_bytes(MIN_KEY_BYTES)


async def key_of_secret(client: Client, secret: str) -> bytes:
    """Return the key in the Secret "namespace/name", which is made where there is none. Waits for the API server.

    Raises AccessError where the Secret holds no key.
    """
    namespace, _, name = secret.partition("/")
    collection = f"/api/v1/namespaces/{namespace}/secrets"
    logged, poll = "", 0
    while True:
        try:
            return _key(await _found_or_made(client, collection, name), secret)
        except AccessError:
            raise
        except KubeError as error:
            sentence = f"the Secret {secret} with the key of the jobs' tokens can be neither read nor created: {error}"
        if sentence != logged or poll % REMINDER_POLLS == 0:
            logger.warning(sentence)
            logged = sentence
        poll += 1
        await asyncio.sleep(POLL_SECONDS)


async def _found_or_made(client: Client, collection: str, name: str) -> Raw:
    path = f"{collection}/{name}"
    try:
        return await client.get(path)
    except NotFound:
        pass
    try:
        made = await client.create(collection, _new(name))
    except Conflict:
        # Another replica was faster, or the answer to our own first request was lost.
        return await client.get(path)
    logger.info("created the Secret %s with a new key for the tokens of jobs", name)
    return made


def _new(name: str) -> Raw:
    key = secrets.token_hex(MIN_KEY_BYTES).encode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "disttrain-operator"}},
        # Another key would not fit the tokens of jobs that run.
        "immutable": True,
        "data": {ENTRY: base64.b64encode(key).decode()},
    }


def _key(raw: Raw, secret: str) -> bytes:
    try:
        key = base64.b64decode((raw.get("data") or {}).get(ENTRY, "")).strip()
    except binascii.Error:
        key = b""
    if len(key) < MIN_KEY_BYTES:
        raise AccessError(
            f"the Secret {secret} holds a key of {len(key)} bytes under '{ENTRY}', and must hold at least"
            f" {MIN_KEY_BYTES} bytes; delete it, and the operator makes another one when it starts again"
        )
    return key
