"""Talk to a hub over HTTP: patient with bad networks, suspicious of what comes back."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode

from urllib3 import BaseHTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError
from urllib3.util import parse_url

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError, how_to_install
from mergetta.expert import Expert
from mergetta.files import expect, read_bytes, read_header

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAX_DOWNLOAD = 256 * 2**20
BACKOFF = 0.25
"""Seconds before the second retry; doubled for each further one."""
MAX_WAIT = 30.0
"""The longest that one Retry-After can hold up a request."""
PATIENCE = 120.0
"""How long a bundle may be in the making before we give up for now."""


class HubError(MergettaError):
    """The hub said no, in its own sentence."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class HubUnreachable(HubError):
    """Nobody answered: worth trying again later."""


class BundleRefused(HubError):
    """The hub answered, but with a bundle that must not be used."""


class Fetched(NamedTuple):
    bundle: Bundle
    id: str
    """sha256 of `data`, in hex."""
    data: bytes
    """As the hub sent it, so that whoever keeps it keeps what was verified."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    data: bytes

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise HubError("The hub's answer is not a JSON object: is this the address of a hub?", self.status)
        return value


class Patient(Retry):
    """Waits as long as the hub asks for, within reason."""

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        try:
            wait = super().get_retry_after(response)
        except InvalidHeader:
            return None
        return None if wait is None else min(wait, MAX_WAIT)


class HubClient:
    """Every request may be repeated: the hub knows experts and bundles by their content.

    `verify_keys` (32 raw bytes each, of Ed25519 public keys) refuse bundles that none of their owners signed; with
    several, a hub can change its key. `ca` is a file of certificate authorities for hubs with certificates of their
    own.

    >>> client = HubClient("https://hub.example", token="…")   # doctest: +SKIP
    >>> client.bundle(runtime.family).bundle.dimension         # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 10,
        ca: str | Path | None = None,
        verify_keys: Sequence[bytes] = (),
        retries: int = 4,
    ) -> None:
        self.url = checked_url(url)
        if ca is not None and not Path(ca).is_file():
            raise MergettaError(f"There is no file of certificate authorities {str(ca)!r}.")
        self._keys = [load_key(key) for key in verify_keys]
        headers = {"User-Agent": "mergetta"}
        if token is not None:
            if not token.isascii() or not token.isprintable() or " " in token:
                raise MergettaError("The hub's token holds characters that no token has: was it copied whole?")
            headers["Authorization"] = f"Bearer {token}"
        self._pool = PoolManager(
            headers=headers, timeout=Timeout(connect=timeout, read=timeout), ca_certs=None if ca is None else str(ca)
        )
        self._retries = Patient(
            total=retries,
            allowed_methods=None,  # all: see the class
            status_forcelist={429, 502, 503, 504},
            backoff_factor=BACKOFF,
            backoff_jitter=BACKOFF,
            raise_on_status=False,
        )

    def register_family(self, data: bytes) -> None:
        """Tell the hub of a family; `data` are the bytes of a family file."""
        family = expect(read_header(data, "the family file"), "family", str, "the family file")
        self._request("PUT", f"/v1/families/{quote(family, safe='')}", data)

    def families(self) -> list[str]:
        """Those that the token sees."""
        answer = self._request("GET", "/v1/families")
        try:
            return [str(family["id"]) for family in json.loads(answer.data)]
        except (ValueError, TypeError, KeyError) as error:
            raise HubError("The hub's answer is no list of families: is this the address of a hub?") from error

    def family_file(self, family: str) -> bytes | None:
        """What a family was registered with, as bytes of a family file; None if the hub does not know it."""
        try:
            return self._request("GET", f"/v1/families/{quote(family, safe='')}/file").data
        except HubError as error:
            if error.status == 404:
                return None
            raise

    def check_contributor(self, family: str) -> None:
        """A token that may not upload may not look at others' experts either, and is told so here."""
        self._request("GET", f"/v1/families/{quote(family, safe='')}/experts?limit=1")

    def upload_expert(self, expert: Expert) -> dict[str, Any]:
        """The hub's word on it: `id`, `state`, `domain`. The same expert again changes nothing."""
        if not expert.family:
            raise MergettaError("This expert does not say which family it belongs to, so no hub can take it.")
        path = f"/v1/families/{quote(expert.family, safe='')}/experts"
        return self._request("POST", path, expert.to_bytes()).json()

    def bundle(
        self, family: str, etag: str | None = None, exclude: Sequence[str] = (), exclude_own: bool = False
    ) -> Fetched | None:
        """The hub's current bundle, verified; None if it is still the one with the id `etag`."""
        query = [*(("exclude", domain) for domain in exclude), *([("exclude_own", "true")] if exclude_own else [])]
        path = f"/v1/families/{quote(family, safe='')}/current" + (f"?{urlencode(query)}" if query else "")
        headers = {"If-None-Match": f'"{etag}"'} if etag else {}
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._request("GET", path, headers=headers)
            if answer.status == 304:
                return None
            if answer.status != 202:
                return self.blob(family, self._named(answer, family, whole=not query))
            wait = waiting_time(answer.headers.get("Retry-After"))
            if time.monotonic() + wait > deadline:
                raise HubError("The hub is still building this bundle: try again later.", answer.status)
            time.sleep(wait)

    def blob(self, family: str, id: str) -> Fetched:
        """A bundle by its id, which need not be the current one, verified."""
        return self._verified(self._request("GET", f"/v1/blobs/{quote(id, safe='')}"), family, id)

    def report(self, reports: list[dict[str, Any]]) -> None:
        body = json.dumps(reports, allow_nan=False).encode()
        self._request("POST", "/v1/reports", body, {"Content-Type": "application/json"})

    def public_key(self) -> bytes | None:
        """What the hub signs with, or None if it does not sign. To be of use it must be compared by other means."""
        try:
            answer = self._request("GET", "/v1/key").json()
        except HubError as error:
            if error.status == 404:
                return None
            raise
        return decode_key(str(answer.get("key")).encode())

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        all_headers = {**self._pool.headers, **(headers or {})}
        if body is not None:
            all_headers.setdefault("Content-Type", "application/octet-stream")
        retries: Retry = self._retries
        try:
            while True:
                response = self._pool.request(
                    method,
                    self.url + path,
                    body=body,
                    headers=all_headers,
                    retries=retries,
                    redirect=False,
                    preload_content=False,
                )
                try:
                    answer = Answer(response.status, response.headers, read_limited(response))
                    break
                except HTTPError as error:  # broke off within the body, which urllib3 does not repeat by itself
                    retries = retries.increment(method, path, error=error)
                    retries.sleep()
                finally:
                    response.release_conn()
        except HTTPError as error:
            cause = error.reason if isinstance(error, MaxRetryError) and error.reason else error
            raise HubUnreachable(
                f"Cannot reach the hub at {self.url}: {str(cause).rpartition(': ')[2].rstrip('.')}."
            ) from error
        if answer.status == 401 and "Authorization" not in all_headers:
            raise HubError("The hub asks for a token: give it as --token, $MERGETTA_TOKEN or `token`.", answer.status)
        if answer.status >= 300 and not (answer.status == 304 and "If-None-Match" in all_headers):
            raise HubError(sentence(answer, self.url), answer.status)
        return answer

    def _named(self, answer: Answer, family: str, whole: bool) -> str:
        """The id of the bundle that the hub says is current, verified: that of the whole pool, or of a variant."""
        self._check_signature(answer)
        found = answer.json()
        if found.get("family") != family or not isinstance(found.get("bundle"), str):
            raise BundleRefused(f"The hub does not say which bundle of the family {family!r} is current.")
        if whole == bool(found.get("variant", not whole)):  # signed as it may be
            raise BundleRefused("The hub's answer is to another question: it leaves out other experts than we asked.")
        return str(found["bundle"])

    def _check_signature(self, answer: Answer) -> None:
        if self._keys:
            check_signature(self._keys, answer.data, answer.headers.get("X-Mergetta-Signature"))

    def _verified(self, answer: Answer, family: str, id: str) -> Fetched:
        data = answer.data
        if hashlib.sha256(data).hexdigest() != id:
            raise BundleRefused("The hub's bundle is not the one it announced: it was damaged or changed on the way.")
        self._check_signature(answer)
        try:
            bundle = Bundle.from_bytes(data, "The hub's bundle")
        except MergettaError as error:
            raise BundleRefused(str(error)) from error
        if bundle.family != family:
            raise BundleRefused(f"The hub's bundle belongs to the family {bundle.family!r}, but this is {family!r}.")
        return Fetched(bundle, id, data)


def checked_url(url: str) -> str:
    try:
        parts = parse_url(url)
    except HTTPError:
        parts = parse_url("")
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise MergettaError(f"The hub's address must look like https://hub.example, not {url!r}.")
    return url.rstrip("/")


def read_limited(response: BaseHTTPResponse) -> bytes:
    """The body as sent (we ask for no compression), however large it claims or turns out to be."""
    data = bytearray()
    while chunk := response.read(2**20, decode_content=False):
        data += chunk
        if len(data) > MAX_DOWNLOAD:
            response.close()
            raise HubError(f"The hub sent more than {MAX_DOWNLOAD // 2**20} MiB: that is no answer of a hub.")
    return bytes(data)


def sentence(answer: Answer, url: str) -> str:
    """Why the hub said no, in its own words if it had any."""
    try:
        detail = json.loads(answer.data)["detail"]
    except (ValueError, TypeError, KeyError):
        return f"The hub at {url} answered with status {answer.status}, without a reason."
    text = detail if isinstance(detail, str) else json.dumps(detail)
    return f"The hub refused: {text[:500]}"


def waiting_time(retry_after: str | None) -> float:
    """Seconds; one where the hub does not say, never none, so that waiting does not become hammering."""
    try:
        wait = Retry().parse_retry_after(retry_after or "1")
    except InvalidHeader:
        wait = 1.0
    return min(max(wait, 0.1), MAX_WAIT)


def read_key(text: str) -> bytes:
    """A public key as a person gives it: base64, or a file that holds base64 or the 32 bytes themselves."""
    if len(text) > 44 or Path(text).is_file():
        data = read_bytes(text)
        return data if len(data) == 32 else decode_key(data.strip())
    return decode_key(text.encode())


def decode_key(text: bytes) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != 32:
        raise MergettaError("An Ed25519 public key is 32 bytes in base64 (44 characters); this is not one.")
    return key


def load_key(key: bytes) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ModuleNotFoundError:
        raise MergettaError(f"Verifying signatures needs cryptography: {how_to_install('signing')}") from None
    try:
        return Ed25519PublicKey.from_public_bytes(key)
    except ValueError as error:
        raise MergettaError(f"This is no Ed25519 public key: {error}.") from error


def check_signature(keys: Sequence[Ed25519PublicKey], data: bytes, signature: str | None) -> None:
    from cryptography.exceptions import InvalidSignature

    if signature is None:
        raise BundleRefused("The hub's bundle is not signed, but a signature is asked for.")
    for key in keys:
        with contextlib.suppress(binascii.Error, InvalidSignature):
            key.verify(base64.b64decode(signature, validate=True), data)
            return
    raise BundleRefused("The hub's bundle is not signed by a key it must be signed by.")
