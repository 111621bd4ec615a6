"""Where programs that all run at once wait for each other."""

# A checker takes the language of the kernels for Python.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from iternorm.backends.triton.runtime import INTERPRETED

# One program has nobody to wait for.
ALONE = tl.constexpr(INTERPRETED)


@triton.jit
def arrived(counter_ptr):
    """How often programs have arrived, for the first thread; the others, who will wait for it, see enough."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred %first;
        .reg .b32 %thread;
        mov.u32 %thread, %tid.x;
        setp.eq.u32 %first, %thread, 0;
        mov.b32 $0, 0x7fffffff;
        @%first ld.acquire.gpu.global.b32 $0, [$1];
        }""",
        "=r,l", [counter_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def meet(counter_ptr, arrivals):
    """Wait until programs have arrived so often in all. What they wrote before can be read after it."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")
    if not ALONE:
        while arrived(counter_ptr) < arrivals:
            pass
    tl.debug_barrier()
