"""Texts that stream in a terminal, side by side where it is wide enough, with drafted tokens in green."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import TextIO

from transformers import PreTrainedTokenizerBase

GREEN, DEFAULT_COLOUR = "\x1b[32m", "\x1b[39m"
UP_AND_CLEAR = "\x1b[{}F\x1b[J"  # the cursor so many lines up, and all below it away
GAP = "   "  # between two columns
MIN_COLUMN = 34  # narrower, and the answers stand below one another
SECONDS_PER_FRAME = 0.05
NO_LIMIT = sys.maxsize


class Answer:
    """A text as it streams: lines of characters, and of each whether its token was drafted."""

    def __init__(self, title: str, tokenizer: PreTrainedTokenizerBase, width: int) -> None:
        """``width``: columns of a line."""
        self.title, self.tokenizer, self.width = title, tokenizer, width
        self.ids: list[int] = []
        self.num_forwards, self.seconds = 0, 0.0
        self.lines: list[list[tuple[str, bool]]] = [[]]
        self._context = self._shown = 0  # tokens; those between them are decoded again with the next, which may join
        self._drafted = False  # the last token
        self._used = 0  # columns of the last line

    def add(self, token_ids: Sequence[int], num_accepted: int, seconds: float) -> None:
        """What a forward of the target gave, its first ``num_accepted`` drafted; ``seconds`` since the start."""
        self.num_forwards += 1
        self.seconds = seconds
        for index, token_id in enumerate(token_ids):
            self.ids.append(token_id)
            self._drafted = index < num_accepted
            text = self._new_text()
            if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a part of a character
                self._show(text)

    def finish(self) -> None:
        """Show what is left of a character that remained incomplete."""
        self._show(self._new_text())

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds

    @property
    def tau(self) -> float:
        return len(self.ids) / self.num_forwards

    @property
    def figures(self) -> str:
        if not self.ids:
            return ""
        return f"{self.tokens_per_second:.1f} tokens/s, τ {self.tau:.2f}, {len(self.ids)} tokens"

    def _new_text(self) -> str:
        before = self._decode(self.ids[self._context : self._shown])
        return self._decode(self.ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _show(self, text: str) -> None:
        self._context, self._shown = self._shown, len(self.ids)
        for char in text.replace("\t", "    "):
            if char == "\n":
                self.lines.append([])
                self._used = 0
            elif char.isprintable():  # what a model writes must not move the cursor
                self._put(char)

    def _put(self, char: str) -> None:
        self._used += columns_of(char)
        if self._used > self.width:
            self._break_line(char == " ")
            if char == " ":
                return
            self._used += columns_of(char)
        self.lines[-1].append((char, self._drafted))

    def _break_line(self, at_end: bool) -> None:
        """Begin a new line ``at_end``, else before the last word, or within a word that fills the whole line."""
        line = self.lines[-1]
        spaces = [index for index, (char, _) in enumerate(line) if char == " "]
        cut = spaces[-1] + 1 if spaces and not at_end else len(line)
        self.lines[-1:] = [line[:cut], line[cut:]]
        self._used = columns_of("".join(char for char, _ in line[cut:]))


def columns_of(text: str) -> int:
    """Columns that a terminal gives to characters."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1
               for char in text if unicodedata.category(char) not in ("Mn", "Me"))


class Screen:
    """Where answers are drawn: again and again in the same place of a terminal, or once in a file."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        size = shutil.get_terminal_size()
        self.height = size.lines
        half = (size.columns - 1 - len(GAP)) // 2  # a full last column makes some terminals go on to the next line
        self.two_columns = self.live and half >= MIN_COLUMN
        self.column = half if self.two_columns else max(1, size.columns - 1) if self.live else NO_LIMIT
        self._num_drawn, self._drawn_at = 0, 0.0

    def drafted(self, text: str) -> str:
        return f"{GREEN}{text}{DEFAULT_COLOUR}" if self.live else f"[{text}]"

    def draw(self, answers: Sequence[Answer], growing: Answer) -> None:
        """The end of ``growing`` and what is beside it, unless the last frame is still fresh."""
        now = time.perf_counter()
        if not self.live or now - self._drawn_at < SECONDS_PER_FRAME:
            return
        self._drawn_at = now
        room = max(1, self.height - 3)  # beside the two lines above the texts and the cursor's
        self._write(self._rows(answers, max(0, len(growing.lines) - room), room))

    def keep(self, answers: Sequence[Answer]) -> None:
        """All of the answers, to stay."""
        self._write([*self._rows(answers, 0, NO_LIMIT), ""])
        self._num_drawn = 0

    def _write(self, rows: Sequence[str]) -> None:
        back = UP_AND_CLEAR.format(self._num_drawn) if self._num_drawn else ""
        self.stream.write(back + "".join(f"{row}\n" for row in rows))
        self.stream.flush()
        self._num_drawn = len(rows)

    def _rows(self, answers: Sequence[Answer], first: int, count: int) -> list[str]:
        """Titles, figures and ``count`` lines from ``first`` on."""
        columns = [[self._paint([(char, False) for char in text]) for text in
                    (answer.title[: answer.width], answer.figures[: answer.width])] +
                   [self._paint(line) for line in answer.lines[first : first + count]] for answer in answers]
        blank = " " * self.column if self.two_columns else ""
        return [GAP.join(cells).rstrip() for cells in zip_longest(*columns, fillvalue=blank)]

    def _paint(self, line: Sequence[tuple[str, bool]]) -> str:
        """Filled up to the column where another one stands beside it."""
        text, used = "", 0
        for drafted, run in groupby(line, key=lambda pair: pair[1]):
            words = "".join(char for char, _ in run)
            text += self.drafted(words) if drafted else words
            used += columns_of(words)
        return text + " " * (self.column - used) if self.two_columns else text
