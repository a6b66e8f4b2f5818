"""Errors that ranks raise about each other."""


class PeerError(RuntimeError):
    """A rank is dead, late, gone or has raised: the message names it."""


def again(error: PeerError) -> PeerError:
    """Return the same sentence to be raised once more, with a traceback of its own."""
    new = PeerError(*error.args)
    new.__cause__ = error.__cause__
    return new


def from_network(error: BaseException) -> RuntimeError | None:
    """Return the error of a group or store behind `error`, the deepest RuntimeError in its chain; else None.

    torch wraps the error of a group that it has not made itself in one about its own log.
    """
    found, each = None, error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        found = each if isinstance(each, RuntimeError) else found
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    return found
