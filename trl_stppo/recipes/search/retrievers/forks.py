"""What a forked child must not take over: locks that are held, requests on their way, connections."""

import os
import weakref
from collections.abc import Callable


def in_every_child(forget: Callable[[], None]) -> None:
    """Call a bound method in every forked child, right after the fork, while its object lives.

    Only the forking thread goes on in a child. What another thread of the parent had begun would be
    waited for for ever.
    """
    if hasattr(os, "register_at_fork"):
        living = weakref.WeakMethod(forget)

        def call() -> None:
            method = living()
            if method is not None:
                method()

        os.register_at_fork(after_in_child=call)
