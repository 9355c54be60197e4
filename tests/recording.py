"""Records which keys of a config are read."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from expert_iteration.config.leaves import leaves


class ReadRecorder:
    """Reads like the config that it wraps and remembers every leaf that was read, by dotted key.

    Hand it to the code under test in place of the config: `recorder = ReadRecorder(config); run(recorder, ...)`, then
    `recorder.unread()`.
    """

    def __init__(self, section: Any, prefix: str = "", read: set[str] | None = None) -> None:
        self._section, self._prefix = section, prefix
        self.keys_read: set[str] = set() if read is None else read

    def __getattr__(self, name: str) -> Any:
        key, value = self._prefix + name, getattr(self._section, name)
        if is_dataclass(value):
            return ReadRecorder(value, key + ".", self.keys_read)
        self.keys_read.add(key)
        return value

    def unread(self) -> set[str]:
        """Leaves of the schema that nothing has read."""
        return {leaf.key for leaf in leaves()} - self.keys_read
