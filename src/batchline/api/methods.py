"""Dispatches the methods of one path to their handlers."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.cors import options_response
from batchline.domain.errors import MethodNotAllowed

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Methods:
    """Dispatches the methods of one path; HEAD goes to the handler of GET, and OPTIONS names the methods."""

    def __init__(self, **handlers: Handler) -> None:
        self.methods = tuple(handlers)
        self._handlers = handlers
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._handlers["OPTIONS"] = self._options
        self._allow = ", ".join(sorted(self._handlers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            raise MethodNotAllowed(
                f"{scope['method']} is not allowed here; allowed: {self._allow}", headers={"allow": self._allow}
            )
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)

    async def _options(self, request: Request) -> ASGIApp:
        return options_response(request.headers, allow=self._allow)
