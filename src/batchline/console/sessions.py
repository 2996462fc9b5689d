"""Signs people in to the console.

A person signs in with a key, and gets a session: a random secret in a cookie. The database holds the hash of the secret
and the key it was opened with, so that every process of a fleet knows the session, and it ends with the key: when that
is revoked, expires or gets a new secret.

The administrator signs in with the administrator's token. Such a session is found by an HMAC of its secret with that
token, so it ends when the token is changed, and the token cannot be found out from the database. It may open any
project, one at a time. For that the service creates a key in the project: nobody knows its secret, and the owners of
the project see it in their list of keys.

Each form carries a token against forged requests (CSRF): a hash of the cookie, which no other site can read. Beside it,
the cookie is SameSite=Strict, and a request that the browser says to come from another site is refused.
"""

from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from batchline.api.auth import Auth
from batchline.api.read_rate import ReadRate
from batchline.api.services import ApiServices
from batchline.domain import ids
from batchline.domain.errors import ForgedRequest, InvalidCredentials, MissingScope, NotFound, RateLimited
from batchline.domain.records import BATCH_SCOPE, READ_SCOPE, AdminSession, Key, Owner, Project, Session
from batchline.ports import Accounts, Clock, NewKey, Random

SESSION_COOKIE, FORM_COOKIE = "batchline_session", "batchline_form"
CSRF_FIELD = "csrf"
SESSION_SECONDS = 12 * 3600
"""A working day. After that a person signs in again."""
LINK_SECONDS = 3600
"""The time for which the link that ``serve`` prints is valid. It works once."""
_MAX_FAILURES = 20
_FAILURE_SECONDS = 60.0
"""The failed attempts to sign in from one address after which another wrong key gets 429. A key has 192 random bits, so
this is not what keeps it secret. A valid key is accepted all the same: everyone behind a proxy has one address, and a
stranger there must not keep the others out."""
_MAX_ADDRESSES = 10_000
_SECRET_BYTES = 32
_LINK_KEY_NAME = "console on this machine"
_ADMIN_KEY_NAME = "console of the administrator"
_OWN_KEY_HINT = "no secret"
"""The hint of a key whose secret nobody knows. People can choose the name of a key, and not its hint."""
_ADMIN_READS = "administrator"
"""The name under which reads of the administrator are counted, as others are by their key."""
_CONSOLE_SCOPES = frozenset({READ_SCOPE, BATCH_SCOPE})
_OWN_SITE = frozenset({"same-origin", "none"})
_READING = frozenset({"GET", "HEAD"})


class SignInNeeded(Exception):
    """The request has no session, or one that has ended."""


class ProjectNeeded(Exception):
    """The administrator is signed in and has no project open."""


class SignedIn:
    """A request of a person who is signed in. ``is_admin`` says that it is the administrator."""

    def __init__(self, secret: str, *, is_admin: bool) -> None:
        self.csrf = csrf_token(secret)
        self.is_admin = is_admin
        self.form: Mapping[str, str] = {}
        """The fields of a form that was sent."""

    def check_csrf(self, token: str | None) -> None:
        """Raise ForgedRequest unless a form carries the token of this session."""
        if token is None or not compare_digest(token.encode(), self.csrf.encode()):
            raise ForgedRequest

    @property
    def values(self) -> dict[str, Any]:
        """The values that every page of this person shows."""
        return {"session": None, "csrf": self.csrf, "is_admin": self.is_admin}


class Visit(SignedIn):
    """A request about one project."""

    def __init__(self, session: Session, secret: str, *, is_admin: bool = False) -> None:
        super().__init__(secret, is_admin=is_admin)
        self.session = session
        self.owner: Owner = session.owner

    @property
    def project_id(self) -> str:
        return self.owner.project_id

    @property
    def values(self) -> dict[str, Any]:
        return super().values | {"session": self.session, "may_write": self.owner.may(BATCH_SCOPE)}


class AdminVisit(SignedIn):
    """A request of the administrator about all projects. ``project`` is the one that is open, if one is."""

    def __init__(self, session: AdminSession, secret: str) -> None:
        super().__init__(secret, is_admin=True)
        self.project = session.project

    @property
    def values(self) -> dict[str, Any]:
        return super().values | {"session": self.project}


class OneTimeLinks:
    """Makes links that sign in without a key, each of them once. They are known to this process alone."""

    def __init__(self, *, random: Random, clock: Clock) -> None:
        self._random, self._clock = random, clock
        self._links: dict[bytes, float] = {}

    def new_path(self) -> str:
        """Return the path of a new link."""
        secret = self._random.bytes(_SECRET_BYTES).hex()
        self._links[_digest(secret)] = self._clock.steady() + LINK_SECONDS
        return f"/console/sign-in?once={secret}"

    def use(self, secret: str) -> bool:
        """Invalidate a link, and return whether it was valid."""
        return self._links.pop(_digest(secret), 0.0) > self._clock.steady()


class Sessions:
    """Opens, finds and closes sessions."""

    def __init__(self, services: ApiServices, *, links: OneTimeLinks | None) -> None:
        self._store, self._clock, self._random = services.store, services.clock, services.random
        self._links = links
        self._on_key_used = services.on_key_used
        self._reads = ReadRate(services.settings.max_key_reads_per_second, clock=services.clock)
        self._failures = FailureLimit(clock=services.clock)
        token = services.settings.admin_token
        self._admin_token = None if token is None else token.get_secret_value().encode() or None

    async def visit(self, request: Request) -> Visit:
        """Return who makes a request about a project.

        Raise SignInNeeded, ProjectNeeded, MissingScope, ForgedRequest or RateLimited.
        """
        secret = request.cookies.get(SESSION_COOKIE, "")
        session = await self._store.session(_digest(secret)) if secret else None
        admin = await self._admin_session(secret) if session is None else None
        if admin is not None:
            session = admin.project
            if session is None:
                raise ProjectNeeded
        if session is None:
            raise SignInNeeded
        check_site(request)
        request.state.owner, request.state.project_id = session.owner, session.owner.project_id
        self._on_key_used(session.owner.key_id)
        scope = READ_SCOPE if request.method in _READING else BATCH_SCOPE
        if not session.owner.may(scope):
            raise MissingScope(scope)
        if request.method in _READING:
            self._reads.take(session.owner.key_id)
        return Visit(session, secret, is_admin=admin is not None)

    async def admin_visit(self, request: Request) -> AdminVisit:
        """Return the administrator who makes a request about all projects.

        Raise SignInNeeded, ForgedRequest or RateLimited, and NotFound for everyone else who is signed in.
        """
        secret = request.cookies.get(SESSION_COOKIE, "")
        session = await self._admin_session(secret)
        if session is None:
            if secret and await self._store.session(_digest(secret)) is not None:
                raise NotFound(f"Unknown route: {request.method} {request.url.path}")
            raise SignInNeeded
        check_site(request)
        if request.method in _READING:
            self._reads.take(_ADMIN_READS)
        return AdminVisit(session, secret)

    async def open_project(self, request: Request, project: Project | None) -> None:
        """Open a project for the administrator who makes a request, or close the one that is open."""
        key_id = None if project is None else await self._own_key(_ADMIN_KEY_NAME, project)
        digest = self._admin_digest(request.cookies.get(SESSION_COOKIE, ""))
        await self._store.open_in_admin_session(digest, key_id=key_id)

    async def _admin_session(self, secret: str) -> AdminSession | None:
        if not secret or self._admin_token is None:
            return None
        return await self._store.admin_session(self._admin_digest(secret))

    def _admin_digest(self, secret: str) -> bytes:
        return hmac_digest(self._admin_token or b"", secret.encode("utf-8", "replace"), "sha256")

    async def signed_in(self, request: Request) -> SignedIn:
        """Return who makes a request that every session may make. Raise SignInNeeded or ForgedRequest."""
        secret = request.cookies.get(SESSION_COOKIE, "")
        is_admin = await self._admin_session(secret) is not None
        if not is_admin and (not secret or await self._store.session(_digest(secret)) is None):
            raise SignInNeeded
        check_site(request)
        return SignedIn(secret, is_admin=is_admin)

    async def sign_in(self, request: Request, key: str) -> str:
        """Open a session of a key, or of the administrator for the administrator's token, and return its secret.

        Raise InvalidCredentials, MissingScope or RateLimited.
        """
        if self._admin_token is not None and compare_digest(key.encode("utf-8", "replace"), self._admin_token):
            return await self._open_for_admin()
        owner = await self._store.owner_of(ids.key_digest(key), None)
        if owner is None:
            self._failures.count(request.client.host if request.client else "")
            raise InvalidCredentials
        if not owner.may(READ_SCOPE):
            raise MissingScope(READ_SCOPE)
        return await self._open(owner.key_id)

    async def sign_in_by_link(self, secret: str) -> str | None:
        """Open a session for a one-time link and return its secret; None if the link is not valid."""
        if self._links is None or not self._links.use(secret):
            return None
        return await self._open(await self._link_key())

    async def sign_out(self, request: Request) -> None:
        """End the session of a request."""
        secret = request.cookies.get(SESSION_COOKIE, "")
        await self._store.close_session(_digest(secret))
        await self._store.close_admin_session(self._admin_digest(secret))

    async def _open_for_admin(self) -> str:
        secret = self._random.bytes(_SECRET_BYTES).hex()
        expires_at = int(self._clock.now()) + SESSION_SECONDS
        await self._store.open_admin_session(self._admin_digest(secret), expires_at=expires_at)
        return secret

    async def _open(self, key_id: str) -> str:
        secret = self._random.bytes(_SECRET_BYTES).hex()
        expires_at = int(self._clock.now()) + SESSION_SECONDS
        if not await self._store.open_session(_digest(secret), key_id=key_id, expires_at=expires_at):
            raise InvalidCredentials
        return secret

    async def _link_key(self) -> str:
        """Return the key of sessions that a link opened: one that nobody knows the secret of.

        It belongs to the project of the oldest key that is valid, or to the project ``default``.
        """
        valid = [key for key in await self._store.keys() if await self._store.is_valid_key(key.id)]
        for key in valid:
            if _is_own(key, _LINK_KEY_NAME):
                return key.id
        names = (valid[0].project, valid[0].organization) if valid else ("default", "default")
        return (await self._store.create_key(self._new_key(_LINK_KEY_NAME, *names))).key_id

    async def _own_key(self, name: str, project: Project) -> str:
        """Return a valid key of a project with this name, and make it if there is none."""
        for key in await self._store.keys():
            if key.project_id == project.id and _is_own(key, name) and await self._store.is_valid_key(key.id):
                return key.id
        return (await self._store.create_key(self._new_key(name, project.name, project.organization))).key_id

    def _new_key(self, name: str, project: str, organization: str) -> NewKey:
        return NewKey(
            key_id=f"key_{self._random.bytes(12).hex()}",
            digest=ids.key_digest(ids.api_key(self._random.bytes(24))),
            hint=_OWN_KEY_HINT,
            project=project,
            project_id=str(UUID(bytes=self._random.bytes(16), version=4)),
            organization=organization,
            organization_id=str(UUID(bytes=self._random.bytes(16), version=4)),
            at=int(self._clock.now()),
            name=name,
        )

    def new_form_secret(self) -> str:
        """Return the cookie of a form that is sent before there is a session."""
        return self._random.bytes(_SECRET_BYTES).hex()


def _is_own(key: Key, name: str) -> bool:
    """Return whether a key was made by the console under this name, and may do what the console does."""
    return (key.name, key.hint) == (name, _OWN_KEY_HINT) and set(key.scopes.split(",")) >= _CONSOLE_SCOPES


class SessionAuth(Auth):
    """Authenticates requests by their session, for routes of the API that the console has too."""

    def __init__(self, *, accounts: Accounts, metered: bool) -> None:
        super().__init__(accounts=accounts, bearer=False, metered=metered, on_key_used=lambda _key_id: None)

    async def owner(self, request: Request) -> Owner:
        """Return the owner that ``Sessions.visit`` has found for this request: each handler of the console calls it."""
        owner: Owner = request.state.owner
        return owner


class FailureLimit:
    """Counts failed attempts to sign in by address."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, list[float]] = {}

    def count(self, address: str) -> None:
        """Count a failed attempt. Raise RateLimited in place of that if the address has failed too often."""
        now = self._clock.steady()
        since = now - _FAILURE_SECONDS
        recent = [at for at in self._failures.get(address, ()) if at > since]
        if len(recent) >= _MAX_FAILURES:
            wait = int(recent[0] - since) + 1
            raise RateLimited(
                f"Too many attempts to sign in. Try again in {wait} seconds.", retry_after=wait, bound="sign_in"
            )
        self._failures[address] = [*recent, now]
        if len(self._failures) > _MAX_ADDRESSES:
            self._failures = {known: at for known, at in self._failures.items() if at[-1] > now - _FAILURE_SECONDS}


def check_site(request: Request) -> None:
    """Raise ForgedRequest if a request that changes something comes from another site, as the browser says."""
    if request.method not in _READING and request.headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        raise ForgedRequest


def csrf_token(secret: str) -> str:
    """Return the token that forms carry. The secret cannot be computed from it."""
    return sha256(b"csrf " + secret.encode("utf-8", "replace")).hexdigest()


def set_cookie(response: Response, request: Request, name: str, value: str, *, seconds: int) -> None:
    """Set a cookie that scripts cannot read and that other sites cannot send."""
    response.set_cookie(
        name, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=_is_encrypted(request)
    )


def clear_cookie(response: Response, request: Request, name: str) -> None:
    """Remove a cookie."""
    set_cookie(response, request, name, "", seconds=0)


def _is_encrypted(request: Request) -> bool:
    """Return whether the browser uses TLS, to this service or to a proxy in front of it."""
    forwarded = request.headers.get("forwarded", "").lower()
    return (
        request.url.scheme == "https"
        or request.headers.get("x-forwarded-proto", "").split(",")[0].strip().lower() == "https"
        or "proto=https" in forwarded
    )


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
