"""Where a store is: a directory, or a PostgreSQL database given by a URL, whose password is never shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from understudy.errors import ConfigError

_SCHEME = re.compile(r"postgres(?:ql)?://")
_QUERY = re.compile(r"\?(?=[\w%]+=)")
_SHORT_PASSWORD = 4
_AROUND_PASSWORDS = (('"', '"'), ("'", "'"), (":", "@"), ("password=", ""))
_SECRET_PARAMETERS = ("password", "sslpassword")


class StoreUrl:
    """The URL of a PostgreSQL database, as libpq reads it. Its text, which equality compares, has no password."""

    def __init__(self, url: str) -> None:
        """Parse a URL. Raises ConfigError if it is not a PostgreSQL URL."""
        if not (scheme := _SCHEME.match(url)):
            # Only the scheme is shown: the rest may hold a password.
            shown_scheme = url.partition("://")[0][:20] if "://" in url else ""
            raise ConfigError(
                f"invalid database URL: its scheme is {shown_scheme!r}, expected postgresql; give one like "
                "postgresql://USER@HOST:PORT/DATABASE"
            )
        self.secret_url = url
        body, *query = _QUERY.split(url[scheme.end() :], maxsplit=1)
        credentials, separator, database = body.rpartition("@")
        name, _, password = credentials.partition(":")
        parameters = query[0].split("&") if query else []
        secret_parameters = [
            parameter
            for parameter in parameters
            if unquote(parameter.partition("=")[0]).lower() in _SECRET_PARAMETERS
        ]
        self._passwords = [
            unquote(password),
            *(unquote(parameter.partition("=")[2]) for parameter in secret_parameters),
        ]
        query_text = "&".join(parameter for parameter in parameters if parameter not in secret_parameters)
        self._text = f"postgresql://{name}{separator}{database}{'?' if query_text else ''}{query_text}"

    def __str__(self) -> str:
        return self._text

    @property
    def database(self) -> str:
        """The database's name, or the whole URL if libpq takes the name from elsewhere."""
        _, slash, name = self._text.partition("://")[2].partition("?")[0].rpartition("/")
        return unquote(name) if slash and name else self._text

    def __repr__(self) -> str:
        return f"StoreUrl({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreUrl) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def without_passwords(self, text: str) -> str:
        """Return a text from libpq with the passwords of this URL replaced.

        A password of a few letters occurs in many words, so it is replaced only where libpq quotes it, or where a
        URL or a list of parameters has it.
        """
        text = text.replace(self.secret_url, self._text)
        for password in filter(None, self._passwords):
            for spelling in {password, quote(password, safe="")}:
                if len(password) >= _SHORT_PASSWORD:
                    text = text.replace(spelling, "***")
                    continue
                for opening, closing in _AROUND_PASSWORDS:
                    text = text.replace(f"{opening}{spelling}{closing}", f"{opening}***{closing}")
        return text


StoreLocation = Path | StoreUrl


def location_name(location: StoreLocation) -> str:
    """Return the name of a directory or of a database, without its path."""
    return location.database if isinstance(location, StoreUrl) else location.resolve().name


def parse_location(text: str | os.PathLike[str]) -> StoreLocation:
    """Parse a location given by a user: a PostgreSQL URL, or else a directory. Raises ConfigError."""
    name = os.fspath(text)
    if _SCHEME.match(name):
        return StoreUrl(name)
    if "://" in name:
        raise ConfigError(
            f"{name.partition('://')[0]}:// is not a supported kind of store; give a directory, or "
            "postgresql://USER@HOST:PORT/DATABASE"
        )
    return Path(name)
