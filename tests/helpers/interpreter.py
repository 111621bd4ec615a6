"""Triton's interpreter, made quicker: it patches its language once a launch, not for every function that is called."""

import functools

import triton.language as tl
from triton.runtime import interpreter


class _Nothing:
    """What a launch is given to undo."""

    def restore(self) -> None:
        pass


@functools.cache
def _languages_of(fn) -> list:
    return [value for value in fn.__globals__.values() if value is tl or value is tl.core]


def patch_once() -> None:
    """Let functions that a kernel calls find the language as the launch has patched it.

    Triton 3.6 looks through all of the language again at each call: a third of the time that the kernels' tests took.
    """
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None:
        # Another version, which has to do without.
        return

    def patch_unless_done(fn):
        # What is patched is no builtin until the launch ends.
        if any(tl.core.is_builtin(language.load) for language in (tl, *_languages_of(fn))):
            return patch(fn)
        return _Nothing()

    interpreter._patch_lang = patch_unless_done
