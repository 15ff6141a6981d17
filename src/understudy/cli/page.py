"""Prints facts, headings and texts below one another, for transcripts and sessions.

What is printed was written by a model, or by a program that the model ran. None of it may reach the terminal as a
control sequence, or rich as markup.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from understudy.util.text import visible

_LINES, _CHARACTERS = 12, 2000


class PagePrinter:
    """Prints to a console. With `full`, nothing is shortened."""

    def __init__(self, console: Console, *, full: bool) -> None:
        self.console = console
        self.full = full
        self._is_plain = not console.is_terminal  # then nothing is styled or wrapped, and rich need not lay it out

    def fact(self, name: str, value: str | Text) -> None:
        """Print a name and its value on one line."""
        line = Text(f"{name:9}", style="bold")
        line.append_text(value if isinstance(value, Text) else Text(visible(value)))
        self.console.print(line, soft_wrap=True)

    def section(self, title: str, depth: int = 0) -> None:
        """Print a heading."""
        self.console.print()
        self.line(f"\u2014\u2014 {title} \u2014\u2014", "bold", depth)

    def line(self, text: str, style: str = "", depth: int = 0) -> None:
        """Print a text that is never shortened."""
        self._print(visible(text), depth, style)

    def text(self, text: str, depth: int = 0, style: str = "") -> None:
        """Print a text, shortened unless `full` is set."""
        for line in self._shortened(visible(text)).split("\n"):
            # Expand tabs, whose width cannot be measured, and give an empty text one line.
            self._print(line.expandtabs() or " ", depth, style)

    def _print(self, text: str, depth: int, style: str) -> None:
        if self._is_plain:
            indent = " " * (2 * depth)
            self.console.file.writelines(f"{indent}{line}\n" for line in text.split("\n"))
        else:
            self.console.print(Padding(Text(text, style=style), (0, 0, 0, 2 * depth), expand=False))

    def _shortened(self, text: str) -> str:
        if self.full:
            return text
        lines = text.strip("\n").split("\n")
        cut = "\n".join(lines[:_LINES])[:_CHARACTERS]
        characters_left = len(text.strip("\n")) - len(cut)
        return (
            cut
            if characters_left <= 0
            else f"{cut}\n\u2026 {characters_left:,} more characters (--full shows them)"
        )
