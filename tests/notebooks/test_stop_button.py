"""The stop button of a notebook ends the call and not the kernel, and leaves the ranks usable."""

import time

import pytest

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

SETUP = """
import time, torch
import baguakit as bk
ranks = bk.Ranks(2)
ranks.run(lambda: None)
def deaf():
    if bk.Comm().rank == 0:
        time.sleep(100)
    bk.primitives.mean_(torch.ones(1), bk.Comm())
"""


def said(client, code, before_the_answer=lambda: None):
    """The reply to a cell, and what it wrote to stderr."""
    errors = []

    def hear(message):
        if message["header"]["msg_type"] == "stream" and message["content"]["name"] == "stderr":
            errors.append(message["content"]["text"])
        if message["header"]["msg_type"] == "status" and message["content"]["execution_state"] == "busy":
            before_the_answer()

    reply = client.execute_interactive(code, timeout=90, output_hook=hear)
    return reply["content"], "".join(errors)


@pytest.mark.slow  # a kernel and two ranks start
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_the_stop_button():
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        assert said(client, SETUP)[0]["status"] == "ok"

        def stop():
            time.sleep(2)
            kernel.interrupt_kernel()

        reply, errors = said(client, "ranks.run(deaf)", stop)
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
        assert "[0]" in errors and " in deaf" in errors
        assert said(client, "assert ranks.run(lambda: bk.Comm().rank) == [0, 1]")[0]["status"] == "ok"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
