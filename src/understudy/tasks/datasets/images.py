"""Which container image an instance runs in."""

from __future__ import annotations

import re

from msgspec import Struct

from understudy.errors import ConfigError, TaskError

_NAMESPACE = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_IMAGE = re.compile(
    r"(?=.{1,255}\Z)[A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]+)?(?:/[a-z0-9._-]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)


class ImageChoice(Struct, frozen=True):
    """Where instance images come from; None leaves what the row or its dataset says.

    A `namespace` of "none" or "" means images that were built on this machine, which have none. Making one raises
    ConfigError when a name cannot be one of an image.
    """

    namespace: str | None = None
    instance_image_tag: str | None = None

    def __post_init__(self) -> None:
        if self.namespace and self.namespace != "none" and not _NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"namespace {self.namespace!r} cannot be part of an image's name; expected lower-case letters, "
                "digits and ._-/ as in swebench or registry.example:5000/swebench"
            )
        if self.instance_image_tag is not None and not _TAG.fullmatch(self.instance_image_tag):
            raise ConfigError(
                f"instance image tag {self.instance_image_tag!r} is invalid; expected letters, digits and ._-"
            )


def instance_image(instance_id: str, choice: ImageChoice, namespace: str = "swebench") -> str:
    """The name SWE-bench gives the image of an instance; `namespace` is its dataset's own."""
    tag = choice.instance_image_tag or "latest"
    name = f"sweb.eval.x86_64.{instance_id.lower()}:{tag}"
    chosen = namespace if choice.namespace is None else choice.namespace
    return name if chosen in ("", "none") else f"{chosen}/{name.replace('__', '_1776_')}"


def named_image(image: str, choice: ImageChoice) -> str:
    """An image that a row names, with another namespace and tag where these were chosen. Raises TaskError."""
    if not _IMAGE.fullmatch(image):
        raise TaskError(
            f"image: invalid name of a container image: {image[:80]!r}; expected as in registry/name:tag"
        )
    if choice.namespace is None and choice.instance_image_tag is None:
        return image
    registry, slash, name = image.partition("@")[0].rpartition("/")
    name, _, tag = name.partition(":")
    tag = choice.instance_image_tag or tag or "latest"
    if choice.namespace in ("", "none"):
        return f"{name.replace('_1776_', '__')}:{tag}"
    return f"{choice.namespace or registry}{slash or ('/' if choice.namespace else '')}{name}:{tag}"
