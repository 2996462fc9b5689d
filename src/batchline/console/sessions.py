"""Signs people in to the console.

A person signs in with a key, and gets a session: a random secret in a cookie. The database holds the hash of the secret
and the key it was opened with, so that every process of a fleet knows the session, and it ends with the key: when that
is revoked, expires or gets a new secret.

The administrator signs in with the administrator's token. Such a session is found by an HMAC of its secret with that
token, so it ends when the token is changed, and the token cannot be found out from the database. It may open any
project, one at a time. For that the service creates a key in the project: nobody knows its secret, and the owners of
the project see it in their list of keys.

Each form carries a token against forged requests (CSRF): a hash of the cookie, which no other site can read, and of the
project whose page the form is on. Beside it, the cookie is SameSite=Strict, and a request that the browser says to come
from another site is refused.
"""

import asyncio
import logging
from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Any
from uuid import UUID

from msgspec.json import encode as encode_json
from starlette.requests import Request

from batchline.api.auth import Auth
from batchline.api.failure_limit import FailureLimit, network_of
from batchline.api.read_rate import ReadRate
from batchline.api.services import ApiServices
from batchline.console.cookies import SESSION_COOKIE, cookie_of
from batchline.domain import ids
from batchline.domain.errors import (
    ForgedRequest,
    InvalidCredentials,
    MissingScope,
    NotFound,
    OtherProject,
    StoreDown,
)
from batchline.domain.records import BATCH_SCOPE, READ_SCOPE, AdminSession, Key, Owner, Project, Session
from batchline.ports import Accounts, Clock, NewKey, Random

log = logging.getLogger(__name__)

CSRF_FIELD = "csrf"
SESSION_SECONDS = 12 * 3600
"""A working day. After that a person signs in again."""
LINK_SECONDS = 3600
"""The time for which the link that ``serve`` prints is valid. It works once."""
_SESSION_CHECK_SECONDS = 2.0
"""The time between two checks of the session of a live page."""
_TRUSTED_SECONDS = 1.0
"""The time for which a session counts as checked. If the body of a request arrives later, it is looked up again."""
_SECRET_BYTES, _ONCE_BYTES = 32, 16
_CSRF_PART_CHARACTERS = 32
"""The length of each of the two parts of a token of a form: 128 bits."""
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

    def __init__(self, secret: str, *, is_admin: bool, project_id: str = "") -> None:
        self.csrf = csrf_token(secret, project_id)
        self.is_admin = is_admin
        self.form: Mapping[str, str] = {}
        """The fields of a form that was sent."""

    def check_csrf(self, token: str | None) -> None:
        """Raise ForgedRequest unless a form carries the token of this session."""
        own, given = self.csrf[:_CSRF_PART_CHARACTERS], (token or "")[:_CSRF_PART_CHARACTERS]
        if not compare_digest(given.encode(), own.encode()):
            raise ForgedRequest

    @property
    def values(self) -> dict[str, Any]:
        """The values that every page of this person shows."""
        return {"session": None, "csrf": self.csrf, "is_admin": self.is_admin}


class Visit(SignedIn):
    """A request about one project. ``once`` is a random text for the forms of its page: see ``form_key``."""

    def __init__(self, session: Session, secret: str, *, once: str, is_admin: bool = False) -> None:
        super().__init__(secret, is_admin=is_admin, project_id=session.owner.project_id)
        self.session = session
        self.owner: Owner = session.owner
        self._once = once

    @property
    def project_id(self) -> str:
        return self.owner.project_id

    def check_csrf(self, token: str | None) -> None:
        """Raise ForgedRequest or OtherProject unless a form is one of this session and of the project that is open."""
        super().check_csrf(token)
        if token != self.csrf:
            raise OtherProject

    def form_key(self, path: str) -> str | None:
        """Return the Idempotency-Key of the form that was sent to a path; None if it has no field ``once``.

        A form that is sent twice has the same key, and one with another content, or of another page, has another.
        """
        if "once" not in self.form:
            return None
        return sha256(encode_json([path, sorted(self.form.items())])).hexdigest()

    @property
    def values(self) -> dict[str, Any]:
        own = {"session": self.session, "may_write": self.owner.may(BATCH_SCOPE), "once": self._once}
        return super().values | own


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
        secret = _secret_of(request)
        session, admin = await self._find(secret)
        if session is None:
            raise SignInNeeded if admin is None else ProjectNeeded
        check_site(request)
        request.state.owner, request.state.project_id = session.owner, session.owner.project_id
        _note_check(request)
        self._on_key_used(session.owner.key_id)
        scope = READ_SCOPE if request.method in _READING else BATCH_SCOPE
        if not session.owner.may(scope):
            raise MissingScope(scope)
        if request.method in _READING:
            self._reads.take(session.owner.key_id)
        once = self._random.bytes(_ONCE_BYTES).hex()
        return Visit(session, secret, once=once, is_admin=admin is not None)

    async def check_after_body(self, request: Request) -> None:
        """Look the session up again if the body took long to arrive. Raise like ``visit``, which was called before it.

        Raise OtherProject if another project was opened meanwhile.
        """
        if is_late(request):
            project_id = request.state.project_id
            visit = await self.visit(request)
            if visit.project_id != project_id:
                raise OtherProject

    async def wait_until_ended(self, request: Request, project_id: str) -> None:
        """Wait until the session of a request has ended, or does not show a project any more."""
        shown = True
        while shown:
            await self._clock.sleep(_SESSION_CHECK_SECONDS)
            try:
                session, _ = await self._find(_secret_of(request))
            except StoreDown as error:
                log.warning("failed to check the session of a live page, retrying", extra={"reason": str(error)})
            else:
                shown = session is not None and session.owner.project_id == project_id

    async def _find(self, secret: str) -> tuple[Session | None, AdminSession | None]:
        """Return the session of a key, or of the administrator with that of the project that is open."""
        session = await self._store.session(_digest(secret)) if secret else None
        if session is not None:
            return session, None
        admin = await self._admin_session(secret)
        return None if admin is None else admin.project, admin

    async def admin_visit(self, request: Request) -> AdminVisit:
        """Return the administrator who makes a request about all projects.

        Raise SignInNeeded, ForgedRequest or RateLimited, and NotFound for everyone else who is signed in.
        """
        secret = _secret_of(request)
        session = await self._admin_session(secret)
        if session is None:
            if secret and await self._store.session(_digest(secret)) is not None:
                raise NotFound(f"Unknown route: {request.method} {request.url.path}")
            raise SignInNeeded
        check_site(request)
        _note_check(request)
        if request.method in _READING:
            self._reads.take(_ADMIN_READS)
        return AdminVisit(session, secret)

    async def open_project(self, request: Request, project: Project | None) -> None:
        """Open a project for the administrator who makes a request, or close the one that is open."""
        key_id = None if project is None else await self._own_key(_ADMIN_KEY_NAME, project)
        digest = self._admin_digest(_secret_of(request))
        await self._store.open_in_admin_session(digest, key_id=key_id)

    async def _admin_session(self, secret: str) -> AdminSession | None:
        if not secret or self._admin_token is None:
            return None
        return await self._store.admin_session(self._admin_digest(secret))

    def _admin_digest(self, secret: str) -> bytes:
        return hmac_digest(self._admin_token or b"", secret.encode("utf-8", "replace"), "sha256")

    async def signed_in(self, request: Request) -> SignedIn:
        """Return who makes a request that every session may make. Raise SignInNeeded or ForgedRequest."""
        secret = _secret_of(request)
        is_admin = await self._admin_session(secret) is not None
        if not is_admin and (not secret or await self._store.session(_digest(secret)) is None):
            raise SignInNeeded
        check_site(request)
        _note_check(request)
        return SignedIn(secret, is_admin=is_admin)

    async def sign_in(self, request: Request, key: str) -> str:
        """Open a session of a key, or of the administrator for the administrator's token, and return its secret.

        Raise InvalidCredentials, MissingScope or RateLimited.
        """
        owner = await self._store.owner_of(ids.key_digest(key), None)
        if owner is None:
            self._check_admin_token(network_of(request), key)
            return await self._open_for_admin()
        if not owner.may(READ_SCOPE):
            raise MissingScope(READ_SCOPE)
        return await self._open(owner.key_id)

    def _check_admin_token(self, network: str, token: str) -> None:
        """Raise InvalidCredentials or RateLimited unless this is the administrator's token."""
        self._failures.check(network)
        if self._admin_token is None or not compare_digest(token.encode("utf-8", "replace"), self._admin_token):
            self._failures.count(network)
            raise InvalidCredentials

    async def sign_in_by_link(self, secret: str) -> str | None:
        """Open a session for a one-time link and return its secret; None if the link is not valid."""
        if self._links is None or not self._links.use(secret):
            return None
        return await self._open(await self._link_key())

    async def sign_out(self, request: Request) -> None:
        """End the session of a request."""
        secret = _secret_of(request)
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


def is_late(request: Request) -> bool:
    """Return whether the session of a request was checked so long ago that it must be looked up again."""
    since: float = request.state.session_checked_at
    return asyncio.get_running_loop().time() - since >= _TRUSTED_SECONDS


def _note_check(request: Request) -> None:
    request.state.session_checked_at = asyncio.get_running_loop().time()


def check_site(request: Request) -> None:
    """Raise ForgedRequest if a request that changes something comes from another site, as the browser says."""
    if request.method not in _READING and request.headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        raise ForgedRequest


def csrf_token(secret: str, project_id: str = "") -> str:
    """Return the token that forms carry. The secret cannot be computed from it.

    Its first part is about the session, and the second one about the project whose page the form is on.
    """
    parts = (f"csrf {secret}", f"csrf {project_id} {secret}")
    hashes = (sha256(part.encode("utf-8", "replace")).hexdigest() for part in parts)
    return "".join(each[:_CSRF_PART_CHARACTERS] for each in hashes)


def _secret_of(request: Request) -> str:
    """Return the secret of the session that a request names; empty if it names none."""
    return cookie_of(request, SESSION_COOKIE)


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
