"""examples/elastic.py: whoever is killed, all go on from the newest complete checkpoint as if nothing had been."""

import pytest
import torch.distributed as dist
from elasticity import digits, elastic, same_losses, trained, undisturbed
from pool import Pool, ranks

pytest.importorskip("sklearn")


def test_after_a_kill_ranks_go_on_as_if_nothing_had_been(tmp_path):
    """One of two ranks is killed, the other hears it, and both begin again from the newest complete checkpoint."""
    steps, folder, data = 40, tmp_path / "killed", (digits().data, digits().target)
    with Pool(2) as pool:
        first = pool.run(trained, folder, steps, 25, *data, lost=(1,))[0].splitlines()
        again = pool.run(trained, folder, steps, None, *data)[0].splitlines()
    assert first[0] == "2 ranks begin at step 0, saved by 0" and again[0] == "2 ranks begin at step 20, saved by 2"
    same_losses(first + again, steps, tmp_path / "whole")
    assert sorted(path.name for path in folder.iterdir()) in (["000030", "000040"], ["000020", "000030", "000040"])


def test_a_checkpoint_counts_once_all_its_files_are_there(tmp_path):
    program = elastic()
    for name in (
        "000010/0-of-1.pt",
        "000020/0-of-2.pt",
        "000020/1-of-2.pt",
        "000030/0-of-2.pt",
        "000030/1-of-2.tmp",
        "000030/1-of-3.pt",
        "000040/1-of-2.pt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(program.complete(tmp_path)) == [(20, 2), (10, 1)]
    data = digits().data, digits().target
    assert ranks(2, lambda *data: elastic(*data).newest(tmp_path), *data) == [(20, 2)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000010", "000020"]


def test_a_part_is_there_whole_or_not_at_all(tmp_path):
    """A rank that dies while it writes leaves no file by the name that is read."""

    def run(images, labels):
        class Dies:
            def __reduce__(self):
                raise OSError("no space left")

        program = elastic(images, labels)
        program.save(tmp_path, 10, {"x": 1})
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(OSError, match="no space left"):
                program.save(tmp_path, 20, {"x": 2, "y": Dies()})
        else:
            program.save(tmp_path, 20, {"x": 2})
        dist.barrier()
        return list(program.complete(tmp_path))

    assert ranks(2, run, digits().data, digits().target) == [[(10, 2)]] * 2
    assert {path.name for path in (tmp_path / "000020").glob("*.pt")} == {"0-of-2.pt"}


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on(tmp_path):
    """Four ranks, then two, then three: each begins where the others ended."""
    said = [undisturbed(n, steps, tmp_path)[0] for n, steps in ((4, 20), (2, 40), (3, 60))]
    assert said == [
        "4 ranks begin at step 0, saved by 0",
        "2 ranks begin at step 20, saved by 4",
        "3 ranks begin at step 40, saved by 2",
    ]
