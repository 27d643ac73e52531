"""Hook of mkdocs that replaces links to files outside docs/ by their names, since the site does not contain these
files."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **rest: Any) -> str:
    """Called by mkdocs with each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, found[2]))
        if target.startswith("docs/"):
            return found[0]
        text = found[1].strip("`")
        return f"`{target}`" if text in target else f"{found[1]} (`{target}`)"

    return _LINK.sub(plain, markdown)
