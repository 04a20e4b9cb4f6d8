"""Checks of errors for ``pytest.raises``, by code and by names in the message; ``errors.ini`` alone has the wording."""

from __future__ import annotations

import re

from thunder_fsdp_sched.errors import code_of


class coded:
    """A check for ``pytest.raises``: ``pytest.raises(ValueError, check=coded("option.too-small", "prefetch", "-1"))``."""

    def __init__(self, code: str, *names: object) -> None:
        self.code = code
        self.names = tuple(map(str, names))

    def __repr__(self) -> str:
        return f"coded{(self.code, *self.names)}"

    def __call__(self, error: BaseException) -> bool:
        assert code_of(error) == self.code, f"{code_of(error)}: {error}"
        missing = [name for name in self.names if name not in str(error)]
        assert not missing, f"{missing} are missing in {str(error)!r}"
        return True

    def naming(self, *names: object) -> coded:
        """Return the same check, of more names."""
        return coded(self.code, *self.names, *names)


class says:
    """A check for the error of another package, in tables beside :class:`coded`: a regular expression."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __repr__(self) -> str:
        return f"says({self.pattern!r})"

    def __call__(self, error: BaseException) -> bool:
        assert re.search(self.pattern, str(error)), f"{self.pattern!r} is not in {str(error)!r}"
        return True
