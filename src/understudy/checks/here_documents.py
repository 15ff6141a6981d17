"""Finds here-documents of shell scripts, such as the program in `python - <<EOF`, and replaces them.

The shell is not parsed: a here-document is whatever starts with `<<` and a delimiter, and ends with a line that is
the delimiter. A delimiter that is found where the shell does not see one is followed by text that happens to end
like a here-document, which is rare, and is then treated as one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

_START = re.compile(
    r"(?<!<)<<(?P<tabs>-?)[ \t]*(?P<word>'[^'\n]+'|\"[^\"\n$`\\]+\"|\w+)(?=[\s;|&)>]|$)", re.MULTILINE
)
_EXPANDED = frozenset("$`\\")


class HereDocument(Struct, frozen=True):
    """A here-document: where its delimiter stands first, and where its text begins and ends in the script.

    `text` is what the command reads; the tabs that `<<-` removes are not in it.
    """

    word: slice
    body: slice
    delimiter: str
    text: str


def here_documents(script: str) -> list[HereDocument]:
    """Return a shell script's here-documents whose text the shell does not change, in their order."""
    documents: list[HereDocument] = []
    texts_begin = texts_end = 0  # where the texts of the last line with here-documents begin and end
    for match in _START.finditer(script):
        line_end = script.find("\n", match.end())
        if texts_begin <= match.start() < texts_end or line_end < 0:
            continue  # in the text of another one, or at the end of the script
        word = match["word"]
        delimiter = word.strip("'\"")
        texts_begin = line_end + 1
        begin = max(texts_begin, texts_end)  # the texts of two on one line follow each other
        indent = "\t*" if match["tabs"] else ""
        end = re.compile(rf"^{indent}{re.escape(delimiter)}$", re.MULTILINE).search(script, begin)
        if end is None:
            continue
        texts_end = end.end() + 1
        text = script[begin : end.start()]
        if delimiter == word and not _EXPANDED.isdisjoint(text):
            continue
        if match["tabs"]:
            text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
        documents.append(HereDocument(slice(*match.span("word")), slice(begin, end.start()), delimiter, text))
    return documents


def with_texts(script: str, texts: Mapping[int, str]) -> str:
    """Return a script with other texts in some of its `here_documents`, by number; the shell does not change them.

    A text in which a line is its delimiter is left out, and the here-document stays as it is.
    """
    for number, document in reversed(list(enumerate(here_documents(script)))):
        text = texts.get(number)
        if text is None or document.delimiter in (line.lstrip("\t") for line in text.split("\n")):
            continue
        script = script[: document.body.start] + text + script[document.body.stop :]
        script = script[: document.word.start] + f"'{document.delimiter}'" + script[document.word.stop :]
    return script
