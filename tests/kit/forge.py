"""Repositories that somebody has tampered with: every object has the right digest, and says what it likes."""

import json
import secrets
from collections.abc import Callable
from typing import Any

from weightvc.objects import frame
from weightvc.stores import open_store

LETTERS = {"manifest": frame.MANIFEST, "layout": frame.LAYOUT, "schema": frame.SCHEMA, "file": frame.FILE}


class Forge:
    """Takes the newest commit of a repository apart, and puts it together again with changes."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)

    def _head(self, letter: str, name: str) -> tuple[dict[str, Any], list[bytes]]:
        head, sections = frame.decode(letter, self.store.get(name).data, name)
        head.pop("sections", None)
        return head, [bytes(section) for section in sections]

    def put(self, kind: str, head: dict[str, Any], sections: list[bytes]) -> str:
        """Store an object under a right key."""
        data = frame.encode(LETTERS[kind], head, sections)
        name = f"{kind}/{frame.digest(data).hex()}.1-{secrets.token_hex(16)}-0"
        self.store.put(name, data)
        return name

    def rewrite(
        self,
        *,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        schema: str | None = None,
        manifest: Callable[[dict[str, Any], list[bytes]], None] = lambda *_: None,
        entry: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """Change the newest commit's record, schema text, manifest and entry in place."""
        root, _ = self._head(frame.ROOT, "root")
        last = root["tail"][-1]
        head, sections = self._head(frame.MANIFEST, last["manifest"])
        if schema is not None:
            last["schema"] = self.put("schema", {"schema": schema}, [])
            head["schema"] = [frame.digest(schema.encode()).hex(), last["schema"]]
        fields = json.loads(last["record"])
        record(fields)
        old, new = last["record"], json.dumps(fields)
        last["record"] = head["record"] = new
        manifest(head, sections)
        last["manifest"] = self.put("manifest", head, sections)
        entry(last)
        ids = {frame.digest(old.encode()).hex(): frame.digest(new.encode()).hex()}
        root["branches"] = {name: ids.get(ident, ident) for name, ident in root["branches"].items()}
        etag = self.store.get("root").etag
        self.store.swap("root", frame.encode(frame.ROOT, root), etag)
