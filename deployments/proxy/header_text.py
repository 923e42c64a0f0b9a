"""Which headers are text, and the error for one that is not.

Serve decodes several headers as UTF-8 (the ids of the request, the session and the model, the
trace, the timeout). If one cannot be decoded, its proxy fails, and the client gets a bare 500. So a
header that is not UTF-8 is refused in front of Serve's code.
"""

from __future__ import annotations

from collections.abc import Iterable

from cfg_core.errors import RequestError

READ_AS_BYTES = frozenset({b"authorization", b"cookie", b"referer", b"user-agent", b"x-api-key"})
"""Headers that may hold any bytes.

Browsers send such cookies, and only our own code reads these headers: as latin-1, where every byte
is a character.
"""


def check_text(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise RequestError that names a header which is not UTF-8."""
    for name, value in headers:
        if not value.isascii() and name not in READ_AS_BYTES and not _is_utf_8(value):
            told = name.decode("ascii", "replace")[:100]
            raise RequestError(f"The header {told} is not UTF-8: send it as UTF-8 text.", told)


def _is_utf_8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
