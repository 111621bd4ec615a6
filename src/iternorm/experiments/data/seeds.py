"""Seeds of generators, derived from their purpose."""

import hashlib


def mixed(*parts: int | str) -> int:
    """A seed from 0 and below 2^64 that is a function of the parts alone, on every machine.

    Sums like ``seed + epoch`` would give the second epoch of one run the order of the first epoch of another.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
