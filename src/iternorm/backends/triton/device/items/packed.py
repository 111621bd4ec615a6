"""Tiles of items whose rows are several channels each, in channels_last: neighbours in memory are read together.

`device.tiles` takes them where a tile has more than one channel of a row (`PACK`).
"""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def packed_places(ptr, samples, channels, start, last, valid, TILE: tl.constexpr):
    """Pointers and mask of a tile of `PACK` channels of each row, in the order of memory: neighbours are read together.

    ``[positions, BC, PACK]``, or ``[positions, BC * PACK]`` where these are all channels of a row, so that the rows of
    a position lie together too. Channels are counted from the first of the group.
    """
    BC: tl.constexpr = TILE.BC
    PACK: tl.constexpr = TILE.PACK
    POSITIONS: tl.constexpr = TILE.BL // TILE.PACK
    there = start + tl.arange(0, POSITIONS) < last
    if TILE.SPAN == TILE.PACK:
        flat = tl.arange(0, BC * PACK)
        pointers = ptr + samples[:, None] + flat[None, :]
        mask = tl.broadcast_to(there[:, None], [POSITIONS, BC * PACK])
        # A mask along the contiguous axis would make every load a scalar one.
        if not TILE.EVEN:
            mask = mask & (flat < PACK * tl.sum(valid.to(tl.int32), 0))[None, :]
    else:
        pointers = ptr + samples[:, None, None] + channels[None, :, None] + tl.arange(0, PACK)[None, None, :]
        mask = tl.broadcast_to(there[:, None, None] & valid[None, :, None], [POSITIONS, BC, PACK])
    return pointers, mask


@triton.jit
def load_packed(ptr, samples, channels, start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    """A tile of rows whose samples are pairs of a position and one of `PACK` channels."""
    BC: tl.constexpr = TILE.BC
    BL: tl.constexpr = TILE.BL
    PACK: tl.constexpr = TILE.PACK
    POSITIONS: tl.constexpr = TILE.BL // TILE.PACK
    pointers, mask = packed_places(ptr, samples, channels, start, last, valid, TILE)
    if FULL and TILE.EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile.reshape(POSITIONS, BC, PACK).permute(0, 2, 1).reshape(BL, BC)


@triton.jit
def store_packed(ptr, samples, channels, value, start, last, valid, TILE: tl.constexpr, FULL: tl.constexpr):
    BC: tl.constexpr = TILE.BC
    PACK: tl.constexpr = TILE.PACK
    POSITIONS: tl.constexpr = TILE.BL // TILE.PACK
    pointers, mask = packed_places(ptr, samples, channels, start, last, valid, TILE)
    value = value.to(pointers.dtype.element_ty).reshape(POSITIONS, PACK, BC).permute(0, 2, 1)
    if TILE.SPAN == TILE.PACK:
        value = value.reshape(POSITIONS, BC * PACK)
    if FULL and TILE.EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)
