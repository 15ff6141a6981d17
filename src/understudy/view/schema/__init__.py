"""Every answer of the viewer's API, and every body that it accepts, as structs. `routes` maps paths to them.

The page's types are generated from these (`understudy view --openapi`). Times are Unix seconds; sizes are in
characters for texts and bytes for raw bodies; costs are in US dollars. No answer has more than `PAGE_BYTES` bytes
of JSON; `next` is the cursor of the page after it, None on the last one. A row that is larger alone has its texts
and lists cut (see `paging`).
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

PAGE_BYTES: Final = 256_000
"""The maximum size of an answer, in bytes."""
TEXT_CHARACTERS: Final = 4_000
"""How many characters of a long text a turn includes. The rest is read by range."""

Size = Annotated[int, Meta(ge=0)]
