"""The error that the command prints as one sentence."""


class Refusal(Exception):
    """A request that cannot be met, in one sentence; `status` is the exit status, 2 for wrong arguments."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status
