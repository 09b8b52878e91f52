"""What can go wrong in a lab. Kept apart from the daemon's errors: no loop handles these."""

from __future__ import annotations


class LabError(Exception):
    """The lab could not be built or did not get where it should; the text says which step and why."""


class CommandError(LabError):
    """A tool ended with an unexpected exit code."""

    def __init__(self, argv: tuple[str, ...], code: int, stderr: str) -> None:
        self.argv, self.code, self.stderr = argv, code, stderr
        super().__init__(f"{' '.join(argv)}: exit {code}: {stderr.strip()[:500]}")
