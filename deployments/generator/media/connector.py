"""Fetches images, audio and video for vLLM, without opening the server's own network to clients.

vLLM fetches any address that a client names, from wherever the replica can reach. Here an address
must be `data:`, or `http(s):` of a public host on its usual port. The check is made on the address
that the socket connects to, for each redirect, so neither a name that resolves to a private address
nor one that changes its address gets through (hosts.py). `allowed_media_domains` in the
engine's arguments names the only hosts to fetch from, which may then be private, and have any port;
`allowed_local_media_path` allows `file:` addresses.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from functools import partial
from io import BytesIO
from typing import Any
from urllib.parse import urljoin

import aiohttp
from typing_extensions import override
from urllib3.util import parse_url
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from cfg_core.errors import CfgServeError, RequestError
from deployments.generator.media.decoding import BoundedMediaIO, decoded, in_thread, refused
from deployments.generator.media.files import MediaFileError, data_parts
from deployments.generator.media.hosts import HostResolver, PrivateAddressError, public_socket
from deployments.generator.media.memory import Client, current_share
from deployments.requests.media_checks import address_of

NAME = "cfg_serve"
LIMITS = {
    "VLLM_MEDIA_CONNECTOR": NAME,
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "20",
    "VLLM_MAX_IMAGE_PIXELS": str(50_000_000),
    "VLLM_MAX_AUDIO_DECODE_BYTES": str(128 * 2**20),
}
"""Environment variables of vLLM that a replica sets, unless the operator did."""

MAX_REDIRECTS = 3


def set_limits() -> None:
    """Let vLLM fetch media by the rules of this module. Called before the engine starts."""
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    # Pillow warns of each odd tag of a file, in words that the client chose.
    warnings.filterwarnings("ignore", module=r"PIL\.")


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class CheckedConnector(MediaConnector):  # type: ignore[misc]  # the registry returns Any
    """vLLM's MediaConnector, with rules about addresses. Raises VLLMValidationError: 400."""

    @override
    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Load what is in the address itself. vLLM's servers fetch with load_from_url_async."""
        if self._kind(url) == "http":
            raise refused("this server does not fetch here: send a data: address.")
        return decoded(partial(self._local, url, BoundedMediaIO(media_io, current_share())))

    @override
    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        """Fetch and decode. `fetch_timeout` is in seconds, for all redirects together."""
        share = current_share()
        counted = BoundedMediaIO(media_io, share)
        if self._kind(url) != "http":
            return await in_thread(partial(self._local, url, counted), counted)
        return await share.downloads.run(partial(self._download, url, counted, fetch_timeout))

    async def _download(self, url: str, counted: BoundedMediaIO, timeout_s: int | None) -> Any:
        async with counted.share.downloads.slot():
            counted.share.is_large = True
            data = await self._fetched(url, counted, timeout_s)
        return await in_thread(partial(counted.load_bytes, data), counted)

    def _kind(self, url: str) -> str:
        try:
            return address_of(url, self.allowed_media_domains)
        except RequestError as error:
            raise VLLMValidationError(error.message, parameter=error.param) from None

    def _local(self, url: str, media_io: BoundedMediaIO) -> Any:
        """What a data: or file: address has."""
        if self._kind(url) == "data":
            return media_io.load_base64(*data_parts(url))
        if self.allowed_local_media_path is None:
            raise refused("file: addresses are not allowed here: send a data: address.")
        try:
            return self._load_file_url(parse_url(url), media_io)
        except (CfgServeError, MediaFileError):
            raise
        except (OSError, ValueError):
            raise refused("there is no such file for clients of this server.") from None

    async def _fetched(self, url: str, counted: BoundedMediaIO, timeout_s: int | None) -> bytes:
        client = counted.share.client
        try:
            async with asyncio.timeout(timeout_s), self._session(client) as http:
                return await self._followed(http, url, counted.max_bytes())
        except VLLMValidationError:
            raise
        except TimeoutError:
            raise refused(f"its host did not send it within {timeout_s} seconds.") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(getattr(error, "os_error", error), PrivateAddressError):
                raise refused("its host has a private address: send a data: address.") from None
            raise refused(f"it cannot be fetched ({type(error).__name__}).") from None

    def _session(self, client: Client) -> aiohttp.ClientSession:
        """A client without proxies, cookies and reuse: each connection is checked.

        It does not decompress, because the limit is for what arrives.
        """
        all_hosts = bool(self.allowed_media_domains)
        connector = aiohttp.TCPConnector(
            resolver=HostResolver(client, all_hosts),
            use_dns_cache=False,
            socket_factory=None if all_hosts else public_socket,
            force_close=True,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def _followed(self, http: aiohttp.ClientSession, url: str, limit: int) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            if self._kind(url) != "http":
                raise refused("its host redirects to something that is no http: address.")
            async with http.get(url, allow_redirects=False) as answer:
                if answer.status in (301, 302, 303, 307, 308):
                    url = urljoin(url, answer.headers.get("Location", ""))
                    continue
                if answer.status != 200:
                    raise refused(f"its host answered with status {answer.status}.")
                return await _body(answer, limit)
        raise refused(f"its host redirects more than {MAX_REDIRECTS} times.")


async def _body(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    data = BytesIO()
    with data:  # it is empty after an error, which keeps this frame
        async for piece in answer.content.iter_chunked(64 * 1024):
            if data.tell() + len(piece) > limit:
                raise refused(f"it has more than {limit} bytes.")
            data.write(piece)
        return data.getvalue()
