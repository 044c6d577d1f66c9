"""URLs without their secrets: what is stored, printed and logged, and compared by a later run.

A URL may carry a password (`https://bob:word@host/a.svs`), a signature (S3, CloudFront, GCS,
Azure) or a token. Its public form is the URL without them. The public form names the slide, so a
URL with a new signature names the same slide. This process keeps the whole URL, and `filesystem`
asks for it when it connects. Other processes of the command find the whole URL in a file that only
the user can read. An environment variable has the path of this file, and the file is deleted when
the command ends.
"""

import atexit
import json
import os
import re
import tempfile
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

URL_MARK = "://"


def is_url(path: str) -> bool:
    """Tells whether a slide or folder is named by a URL (s3://, gs://, az://, https://, ...)."""
    return URL_MARK in path


VARIABLE = "THINSECTION_URL_SECRETS"
# object stores
STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")
_HIDDEN = "***"
_SHORTEST_SECRET = 4  # shorter values are not looked for in texts
# schemes in which the part before '@' is not a user, but a container of Azure or a repository
_NAMED_BEFORE_AT = ("abfs", "abfss", "wasb", "wasbs", "az", "adl", "github")
_PREFIXES = ("xamz", "xgoog", "xms", "xoss", "xcos")
# names of query parameters with secrets, in small letters and without '-' and '_'
_SECRET_NAMES = frozenset(
    (
        # S3 (version 2), CloudFront, GCS (version 2)
        "awsaccesskeyid", "signature", "expires", "keypairid", "policy", "googleaccessid",
        # OSS, COS
        "ossaccesskeyid", "securitytoken", "qsignature",
        # tokens of any server
        "token", "accesstoken", "authtoken", "bearertoken", "refreshtoken", "idtoken", "sastoken",
        "sessiontoken", "jwt", "sig", "hmac", "key", "apikey", "accesskey", "secretkey",
        "secret", "clientsecret", "password", "passwd", "passphrase", "pwd", "pass", "auth",
        "authorization", "credential", "credentials", "sessionid",
    )
)  # fmt: skip
# short names of Azure's shared access signature, which are secrets only if there is also a `sig`
_AZURE_NAMES = frozenset(
    (
        "sv", "ss", "srt", "sr", "sp", "st", "se", "sip", "spr", "si", "sdd", "ses", "skoid",
        "sktid", "skt", "ske", "sks", "skv", "saoid", "suoid", "scid", "rscc", "rscd", "rsce",
        "rscl", "rsct",
    )
)  # fmt: skip
# 'key=slides/a.svs' is the name of an object, not a secret
_FILE_NAME = re.compile(r".*\.[A-Za-z][A-Za-z0-9]{1,7}")
_URLS_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>\\`]+")
_lock = threading.Lock()
_whole_urls: dict[str, str] = {}  # public form -> whole URL


def public_url(url: str) -> str:
    """Returns a URL without user, password, signature and tokens; other texts are not changed."""
    if URL_MARK not in url:
        return url
    return "::".join(map(_public_part, url.split("::")))


def hide_secret(url: str) -> str:
    """Returns the public form of a URL, and keeps the whole one for `whole_url`."""
    public = public_url(url)
    if public != url:
        with _lock:
            is_new = _whole_urls.get(public) != url
            _whole_urls[public] = url
        if is_new:
            _add_to_file(public, url)
    return public


def whole_url(url: str) -> str:
    """Returns the URL with its secret, as the user passed it; other URLs are unchanged."""
    if not is_url(url):
        return url
    with _lock:
        if url in _whole_urls:
            return _whole_urls[url]
    # URLs that processes of this command have kept, by public form; the newest counts
    kept_urls: dict[str, str] = {}
    with suppress(OSError, ValueError, KeyError):
        for line in Path(os.environ[VARIABLE]).read_text("utf-8").splitlines():
            public, whole = json.loads(line)
            kept_urls[str(public)] = str(whole)
    if url in kept_urls:
        return kept_urls[url]
    for public, whole in {**kept_urls, **_whole_urls}.items():
        folder = public.rstrip("/") + "/"
        if "?" not in public and url.startswith(folder):
            # a file below a folder whose secret is known
            parts = urlsplit(whole)
            path = f"{parts.path.rstrip('/')}/{url[len(folder) :]}"
            return urlunsplit(parts._replace(path=path))
    return url


def public_text(text: str) -> str:
    """Returns a text whose URLs have their public form."""
    if URL_MARK not in text:
        return text
    return _URLS_IN_TEXT.sub(lambda match: public_url(match[0]), text)


def without_secrets(text: str) -> str:
    """Returns a text, such as another library's error, without the secrets of this command.

    It searches the text for each secret. For texts of our own, `public_text` is enough.
    """
    text = public_text(text)
    with _lock:
        secrets = _secrets(tuple(_whole_urls.items())) if _whole_urls else ()
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text


def keep_for_jobs() -> None:
    """Leaves the file of the whole URLs for jobs that begin after this command has ended."""
    atexit.unregister(_remove_file)


def _public_part(url: str) -> str:
    if URL_MARK not in url:
        return url
    scheme, _, rest = url.partition(URL_MARK)
    # the user ends at the last '@' before the path: a password may hold '@', but no '/'
    end = min((rest.find(sign) for sign in "/?#" if sign in rest), default=len(rest))
    host = rest[:end]
    if "@" in host and scheme.lower() not in _NAMED_BEFORE_AT:
        host = host.rpartition("@")[2]
    elif ":" in host.rpartition("@")[0] and scheme.lower() != "github":
        user, _, name = host.rpartition("@")
        host = f"{user.partition(':')[0]}@{name}"
    rest = rest[end:]
    path_and_query, _, fragment = rest.partition("#")
    path, _, query = path_and_query.partition("?")
    query = _public_query(query)
    fragment = _public_query(fragment) if "=" in fragment else fragment
    text = f"{scheme}{URL_MARK}{host}{path}"
    text += f"?{query}" if query else ""
    return text + (f"#{fragment}" if fragment else "")


def _public_query(query: str) -> str:
    """Returns a query without its secret parameters; the others are not changed."""
    parts = [part for part in re.split("[&;]", query) if part]
    names = []
    for part in parts:
        name = unquote(part.partition("=")[0]).lower()
        names.append(name.replace("-", "").replace("_", ""))
    is_azure = "sig" in names
    public_parts = []
    for part, name in zip(parts, names, strict=True):
        is_secret = name in _SECRET_NAMES or name.startswith(_PREFIXES)
        if name in ("key", "policy"):
            value = unquote(part.partition("=")[2])
            is_secret = _FILE_NAME.fullmatch(value) is None
        if not is_secret and not (is_azure and name in _AZURE_NAMES):
            public_parts.append(part)
    return "&".join(public_parts)


@lru_cache(maxsize=1)
def _secrets(pairs: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Returns passwords, signatures and tokens of URLs by their public form, the longest first."""
    secrets: set[str] = set()
    for public, whole in pairs:
        secrets.add(whole)
        with suppress(ValueError):
            parts = urlsplit(whole)
            public_names = {name for name, _ in parse_qsl(urlsplit(public).query)}
            secrets |= {parts.password or "", unquote(parts.password or "")}
            for name, value in parse_qsl(parts.query):
                # a shorter value or a number may be a word, a count or a date
                is_unguessable = len(value) >= 16 and not value.isdigit()
                if name not in public_names and is_unguessable:
                    secrets.add(value)
    long_enough = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
    return tuple(sorted(long_enough, key=len, reverse=True))


# other processes


def _add_to_file(public: str, whole: str) -> None:
    """Adds a line with a kept URL to the file that the processes of this command read."""
    with _lock:
        place = os.environ.get(VARIABLE)
        if place is None or not Path(place).is_file():
            from thinsection.config import user_cache_dir  # imports NumPy: slow

            folder = user_cache_dir()
            folder.mkdir(parents=True, exist_ok=True)
            # only the user can read it
            descriptor, place = tempfile.mkstemp(prefix="urls-", dir=folder)
            os.close(descriptor)
            os.environ[VARIABLE] = place
            atexit.register(_remove_file, place, os.getpid())
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(json.dumps([public, whole]) + "\n")


def _remove_file(place: str, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child
        with suppress(OSError):
            Path(place).unlink()
