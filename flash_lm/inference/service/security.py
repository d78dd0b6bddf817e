"""Security headers of the service's answers, and the check of the API key."""

import base64
import hashlib
import hmac
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash_lm.inference.service.completion_format import CompletionProblem, is_openai_path

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    "Referrer-Policy": "no-referrer",
}
_NEED_NO_KEY = ("/health", "/", "/docs", "/openapi.json")  # the pages show nothing of the model except its name
_NO_KEY = "the API key is missing or wrong: send the service's key, as Authorization: Bearer KEY"


def page_headers(page: str) -> dict[str, str]:
    """The headers of a page: it may run only its script and style, by their hashes, and connect only to the service."""
    # Hashes instead of 'unsafe-inline': injected text on the page cannot run.
    hashes = {tag: _hashes(page, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy}


def _hashes(page: str, tag: str) -> str:
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


class SecurityHeaders:
    """Adds HEADERS to every answer, unless the answer has set them."""

    def __init__(self, app: ASGIApp):
        """Wraps an app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the headers when the answer starts."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class ApiKeyCheck:
    """Answers only clients that send the key. Pages and /health are open: browsers and monitors have no key."""

    def __init__(self, app: ASGIApp, key: str):
        """Wraps an app; `key` has visible ASCII characters."""
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 without the key."""
        if scope["type"] != "http" or scope["path"] in _NEED_NO_KEY or self._has_key(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        # In the format that clients of the path expect.
        openai = CompletionProblem.of(401, _NO_KEY, code="invalid_api_key").model_dump()
        problem = openai if is_openai_path(scope["path"]) else {"error": _NO_KEY}
        await JSONResponse(problem, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, sent_key = headers.get("authorization", "").partition(" ")
        # In constant time: otherwise the time of a refusal would tell how much of a guess is right.
        return hmac.compare_digest(sent_key.strip().encode("latin-1"), self._key) and scheme.lower() == "bearer"
