"""Running `ip` and `tc`, whose own words are the error when they fail."""

import subprocess


def run(*command: str, input: str | None = None) -> str:
    """Run a command and return what it prints.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, input=input, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def batch(tool: str, namespace: str, lines: list[str]) -> None:
    """Run several commands of `ip` or `tc` in a namespace, in one process."""
    try:
        run(tool, "-n", namespace, "-batch", "-", input="\n".join(lines) + "\n")
    except RuntimeError as error:
        raise RuntimeError(f"{error}; while running {tool} in {namespace}: {'; '.join(lines)}") from None
