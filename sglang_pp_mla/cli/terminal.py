"""What others wrote must not command the terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with each control character as ``?``: names come from files, and messages from programs."""
    return "".join(one if one.isprintable() else "?" for one in text)
