"""The promise of a source of conversations."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trainer.data.prompt_rows import Row, require_few


class PromptSource(ABC):
    """Where conversations come from."""

    @property
    def quick(self) -> bool:
        """Whether rows are here and need not be fetched."""
        return True

    @abstractmethod
    def rows(self, bad: list[str]) -> list[Row]:
        """All rows that are conversations, in order; for each that is none, `bad` gets a sentence with its
        place. Raises UserError where nothing can be read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the rows do."""

    def all_rows(self) -> list[Row]:
        """All rows; raises UserError where one is no conversation."""
        bad: list[str] = []
        rows = self.rows(bad)
        require_few(bad, len(rows), 0.0)
        return rows
