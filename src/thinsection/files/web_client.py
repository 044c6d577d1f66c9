"""The web client of slides by URL: it connects to no address of this machine that nobody named.

A name in a table may resolve to this machine or to the metadata service of a cloud, and a web
server may redirect there. So addresses are looked at as the client connects, after DNS.
"""

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from thinsection.errors import SlideOpenError
from thinsection.files.trust import is_local_address, is_local_host, may_be_local

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import ResolveResult

WEB = ("http://", "https://")


class LocalAddressError(OSError):
    """A connection that would go to this machine."""


def client_options(url: str) -> dict[str, Any]:
    """Returns how fsspec's file system of a URL makes its web client; nothing for other stores."""
    if not url.lower().startswith(WEB) or may_be_local(url):
        return {}
    return {"get_client": _guarded_client}


def check_connection(error: BaseException, url: str) -> None:
    """Explains an error that a refused connection caused.

    Raises:
        SlideOpenError: the URL leads to this machine.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalAddressError):
            raise SlideOpenError(
                "URL must not lead to this machine or to a link-local network, got "
                f"{cause} for {url!r}; pass --allow-local-urls if you trust its table, or write "
                "'localhost' or the address in the URL"
            ) from None
        cause = cause.__cause__ or cause.__context__


async def _guarded_client(**options: Any) -> "aiohttp.ClientSession":
    """Returns fsspec's client with a look at each address and at each redirect."""
    import aiohttp
    from aiohttp.abc import AbstractResolver

    class GuardedResolver(AbstractResolver):
        def __init__(self) -> None:
            self._resolver = aiohttp.ThreadedResolver()

        async def resolve(
            self,
            host: str,
            port: int = 0,
            family: socket.AddressFamily = socket.AF_INET,
        ) -> "list[ResolveResult]":
            results = await self._resolver.resolve(host, port, family)
            for result in results:
                if is_local_address(result["host"]):
                    raise LocalAddressError(
                        f"the name {host!r} with the address {result['host']}"
                    )
            return results

        async def close(self) -> None:
            await self._resolver.close()

    redirects = aiohttp.TraceConfig()
    redirects.on_request_redirect.append(_check_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=GuardedResolver()),
        trace_configs=[redirects],
        **options,
    )


async def _check_redirect(
    _: "aiohttp.ClientSession",
    __: SimpleNamespace,
    request: "aiohttp.TraceRequestRedirectParams",
) -> None:
    """Refuses a redirect to an address; names are looked at when they are resolved."""
    headers = request.response.headers
    location = headers.get("Location") or headers.get("URI") or ""
    target = urljoin(str(request.url), location)
    if is_local_host(target):
        raise LocalAddressError(f"a redirect to {target!r}")
