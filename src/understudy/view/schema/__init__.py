"""Every answer of the viewer's API, and every body that it takes, as structs. `routes` says which path has which.

The page's types are generated from these (`understudy view --openapi`). Times are Unix seconds, sizes of texts are
in characters and of raw bodies in bytes, costs in US dollars. A page of a list has at most `PAGE_BYTES` as JSON;
`next` is the cursor of the page after it, None on the last one.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

PAGE_BYTES: Final = 256_000
"""The most bytes of a page of a list."""
TEXT_CHARACTERS: Final = 4_000
"""How much of a long text a turn brings along; the rest is read by range."""

Size = Annotated[int, Meta(ge=0)]
