"""Errors that ranks raise about each other."""


class PeerError(RuntimeError):
    """A rank is dead, late, gone or has raised: the message names it."""

    __module__ = "baguakit"  # tracebacks show the public name


def again(error: PeerError) -> PeerError:
    """Return a copy of an error, to be raised again with its own traceback."""
    new = PeerError(*error.args)
    new.__cause__ = error.__cause__
    return new


def from_network(error: BaseException) -> RuntimeError | None:
    """Return the error of a process group or store that caused `error`: the deepest RuntimeError in its chain; or None.

    torch wraps the errors of groups that it has not made itself in an error about its own log.
    """
    found, each = None, error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        found = each if isinstance(each, RuntimeError) else found
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    return found
