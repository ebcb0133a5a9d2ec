"""A keys file for tests, with the keys' texts beside it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from c2cserve.server.access.keyfile import KeyRecord, KeysFile, change_keys, read_keys
from c2cserve.server.access.secret import make_key


class Keys:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, str] = {}
        """The key of each name."""

    @property
    def records(self) -> tuple[KeyRecord, ...]:
        return read_keys(self.path).keys

    def add(self, name: str, **fields: Any) -> str:
        """Return the new key; `fields` are those of its entry."""
        new = make_key()
        entry = {
            "id": new.id, "name": name, "salt": new.salt, "sha256": new.sha256,
            "created": datetime.now(UTC), **fields,
        }  # fmt: skip
        record = msgspec.convert(entry, KeyRecord)
        change_keys(self.path, lambda file: KeysFile(1, (*file.keys, record)))
        self.texts[name] = new.text
        return new.text

    def revoke(self, name: str) -> None:
        now = datetime.now(UTC)
        change_keys(
            self.path,
            lambda file: KeysFile(
                1,
                tuple(
                    msgspec.structs.replace(one, revoked=now) if one.name == name else one
                    for one in file.keys
                ),
            ),
        )
