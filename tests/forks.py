"""Forked processes, hundreds of which begin quickly, and their ends."""

import os
import signal
import traceback


def forked(work, *arguments) -> int:
    """Run `work` in a forked process, whose exit status is 0 if it returns True; return the process's number."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            status = int(work(*arguments) is not True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert end(child) == -signal.SIGKILL
