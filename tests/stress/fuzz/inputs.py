"""Fuzz inputs: valid messages drawn from their schema, and corruptions of them. Pure except for seeded random numbers.

A tree is a message as plain lists and maps; a body is its MessagePack. `Inputs.spoilt` also describes the corruption,
for the table of tried inputs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

INTEGERS = (0, 1, 2, 3, -1, 127, 128, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, math.nan, math.inf, -math.inf, 5e-324)
# Escape sequences, line ends, paths, names like a worker's, and empty ones.
WORDS = (
    "",
    "a",
    "localhost",
    "h:0#1",
    "\x1b[31m\x07",
    "x\ny\r",
    "../../etc/passwd",
    "ü\u202e",
    "\0",
)
DEEP = 3000  # levels; Python itself stops at a thousand
MANY = 0xFFFFFFFF  # elements that a header announces

Tree = Any


class Inputs:
    """Draws messages of a union of structs. Deterministic for each seed."""

    def __init__(self, union: Any, seed: int) -> None:
        self.random = random.Random(seed)
        kind = inspect.type_info(union)
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        self._structs = [each for each in kinds if isinstance(each, inspect.StructType)]
        self.tags = [struct.tag for struct in self._structs]
        self.spoilers: dict[str, Callable[[bytes], bytes]] = {
            "valid": lambda body: body,
            "wrong types": lambda body: self._of_tree(self._retyped),
            "fields left out or added": lambda body: self._of_tree(self._refielded),
            "unknown or foreign tag": lambda body: self._of_tree(self._retagged),
            "nested deep": self._nested,
            "header promises millions": self._promising,
            "truncated": self._truncated,
            "bits flipped": self._flipped,
            "bytes inserted": self._inserted,
            "bytes removed": self._removed,
            "two joined": self._joined,
            "random bytes": lambda body: self.random.randbytes(self.random.randrange(200)),
        }
        self._names = list(self.spoilers)

    def tree(self) -> dict[str, Tree]:
        """Draw a message that fits the schema, but may make no sense."""
        drawn = self._draw(self.random.choice(self._structs), 0)
        assert isinstance(drawn, dict)
        return drawn

    def body(self) -> bytes:
        return msgspec.msgpack.encode(self.tree())

    def spoilt(self, body: bytes, how: str | None = None) -> tuple[str, bytes]:
        """Corrupt the body of a valid message. Return a description of the corruption, and the result."""
        how = how or self.random.choice(self._names)
        return how, self.spoilers[how](body)

    # ---- valid values

    def _draw(self, kind: inspect.Type, depth: int) -> Tree:
        pick = self.random
        match kind:
            case inspect.StructType():
                fields = {
                    field.encode_name: self._draw(field.type, depth + 1)
                    for field in kind.fields
                    if field.required or pick.random() < 0.8 or kind.array_like
                }
                if kind.array_like:
                    return list(fields.values())
                return {kind.tag_field: kind.tag, **fields} if kind.tag_field else fields
            case inspect.UnionType():
                return self._draw(pick.choice(kind.types), depth)
            case inspect.ListType() | inspect.VarTupleType():
                most = 3 if kind.max_length is None else min(3, kind.max_length)
                length = pick.randrange(most + 1)
                return [self._draw(kind.item_type, depth + 1) for _ in range(length)]
            case inspect.TupleType():
                return [self._draw(each, depth + 1) for each in kind.item_types]
            case inspect.DictType():
                keys = pick.sample(WORDS, pick.randrange(3))
                return {key: self._draw(kind.value_type, depth + 1) for key in keys}
            case inspect.LiteralType():
                return pick.choice(kind.values)
            case inspect.EnumType():
                return pick.choice([each.value for each in kind.cls])
            case inspect.IntType():
                return pick.choice(_within(INTEGERS, kind))
            case inspect.FloatType():
                return pick.choice(_within(FLOATS, kind))
            case inspect.StrType():
                return pick.choice(WORDS)
            case inspect.BytesType():
                return pick.randbytes(pick.choice((0, 1, 32, 32, 300)))
            case inspect.BoolType():
                return pick.random() < 0.5
            case inspect.NoneType():
                return None
        raise AssertionError(f"no values can be generated for the type {kind}")

    # ---- invalid values

    def _of_tree(self, spoil: Callable[[dict[str, Tree]], Tree]) -> bytes:
        return msgspec.msgpack.encode(spoil(self.tree()))

    def _junk(self) -> Tree:
        pick = self.random
        junk: tuple[Tree, ...] = (
            None,
            True,
            2**64 - 1,
            1.5,
            "x" * 300,
            b"\0" * 300,
            [],
            {},
            [[]] * 9,
            {"type": "?"},
        )
        return pick.choice(junk)

    def _retyped(self, tree: dict[str, Tree]) -> Tree:
        at: Tree = tree
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = self.random.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and self.random.random() < 0.6:
                at = at[key]
                continue
            at[key] = self._junk()
            return tree

    def _refielded(self, tree: dict[str, Tree]) -> Tree:
        if self.random.random() < 0.5:
            del tree[self.random.choice(list(tree))]
        else:
            tree[self.random.choice(WORDS)] = self._junk()
        return tree

    def _retagged(self, tree: dict[str, Tree]) -> Tree:
        tree["type"] = self.random.choice((*self.tags, "Nothing", "\x1b[2J", "x" * 500, 7, None))
        return tree

    def _nested(self, body: bytes) -> bytes:
        """Nest values deeply, in an unknown field or in place of the message."""
        pick = self.random
        opening = pick.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\0\0\0\1\xa1a"))
        deep = opening * pick.choice((10, DEEP)) + b"\xc0"
        if pick.random() < 0.3 or body[:1] < b"\x80" or body[:1] >= b"\x8f":
            return deep
        return bytes([body[0] + 1]) + body[1:] + b"\xa3???" + deep

    def _promising(self, body: bytes) -> bytes:
        head = self.random.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
        many = self.random.choice((MANY, 10**7, 65536)).to_bytes(4, "big")
        at = self.random.randrange(len(body) + 1)
        return body[:at] + head + many + body[at:]

    def _truncated(self, body: bytes) -> bytes:
        return body[: self.random.randrange(len(body) + 1)]

    def _flipped(self, body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(self.random.choice((1, 1, 1, 2, 8))):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _inserted(self, body: bytes) -> bytes:
        at = self.random.randrange(len(body) + 1)
        return body[:at] + self.random.randbytes(self.random.choice((1, 2, 5, 40))) + body[at:]

    def _removed(self, body: bytes) -> bytes:
        at = self.random.randrange(len(body))
        return body[:at] + body[at + self.random.choice((1, 2, 5)) :]

    def _joined(self, body: bytes) -> bytes:
        other = self.body()
        return body[: self.random.randrange(len(body))] + other[self.random.randrange(len(other)) :]


def _within(values: Sequence[float], kind: inspect.IntType | inspect.FloatType) -> list[float]:
    """Return the values that the schema allows; NaN is within no limits."""
    low = -math.inf if kind.ge is None else kind.ge
    high = math.inf if kind.le is None else kind.le
    limited = kind.ge is not None or kind.le is not None
    return [value for value in values if not limited or low <= value <= high]
