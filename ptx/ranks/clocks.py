"""Vector clocks: what each thread knows of every other. PTX ISA, section 8.9 "Ordering".

Threads of all ranks are numbered. Thread t has an epoch, which counts what t has released, and a clock: of each thread
the last epoch whose accesses come before whatever t does next. Threads that have met at a barrier know the same, and
share one array, which nobody changes: a thread that learns more gets another. Its own epoch stands beside it.
"""

from collections.abc import Iterable

import numpy as np

Clock = np.ndarray


class Clocks:
    """The clocks of `threads` threads.

    Attributes:
        epoch: of each thread; an access is stamped with it.
    """

    def __init__(self, threads: int):
        self.epoch = np.ones(threads, np.int32)
        self.arrays: list[Clock | None] = [np.zeros(threads, np.int32)]
        self.of = np.zeros(threads, np.int32)  # which of the arrays a thread has

    def groups(self, threads: np.ndarray) -> list[tuple[Clock, np.ndarray]]:
        """Return the arrays that threads have, and which threads have each."""
        which = self.of[threads]
        if (which == which[0]).all():
            return [(self._array(which[0]), threads)]
        return [(self._array(each), threads[which == each]) for each in np.unique(which)]

    def _array(self, place) -> Clock:
        array = self.arrays[place]
        assert array is not None
        return array

    def know(self, threads: np.ndarray, others: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return, by broadcasting, whether accesses of others, stamped with epochs, come before threads' next."""
        which = self.of[threads]
        if which.size and (which == which.flat[0]).all():
            known = self._array(which.flat[0])[others]
        else:
            found, place = np.unique(which, return_inverse=True)
            known = np.stack([self._array(each) for each in found])[place.reshape(which.shape), others]
        return (known >= epochs) | (threads == others)

    def learn(self, threads: np.ndarray, clock: Clock) -> None:
        """Join a clock to those of threads."""
        for array, having in self.groups(threads):
            joined = np.maximum(array, clock)
            if not np.array_equal(joined, array):
                self._give(having, joined)

    def meet(self, threads: np.ndarray) -> None:
        """Order what each of the threads did before what any of them does next."""
        joined = np.maximum.reduce([array for array, _ in self.groups(threads)])
        joined[threads] = self.epoch[threads]
        self._give(threads, joined)
        self.epoch[threads] += 1

    def follow(self, threads: np.ndarray, before: np.ndarray) -> None:
        """Order all that the threads of an earlier launch did before what some do next."""
        self.meet(np.union1d(threads, before))

    def known(self, threads: np.ndarray) -> Clock:
        """Return what every one of the threads knows, and its own accesses if it is one thread."""
        parts = []
        for array, having in self.groups(threads):
            if len(having) == 1:
                array = array.copy()
                array[having] = self.epoch[having]
            parts.append(array)
        return np.minimum.reduce(parts)

    def passed(self, threads: np.ndarray) -> None:
        """Accesses from now on are not part of what the threads have released."""
        self.epoch[threads] += 1

    def _give(self, threads, array):
        left = np.unique(self.of[threads])
        self.arrays.append(array)
        self.of[threads] = len(self.arrays) - 1
        for each in left:
            if not (self.of == each).any():
                self.arrays[each] = None
        if len(self.arrays) > 4 * len(self.of) + 64:
            kept, self.of[:] = np.unique(self.of, return_inverse=True)
            self.arrays = [self.arrays[each] for each in kept]


def least(clocks: Iterable[Clock]) -> Clock:
    """Return what all of some clocks know."""
    return np.minimum.reduce([*clocks])
