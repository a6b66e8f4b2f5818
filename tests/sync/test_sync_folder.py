"""Publishers and subscribers of a folder: every subscriber has a published version, bit for bit."""

import shutil
import sys

import pytest
import torch
from torch import nn

import baguakit as bk
from baguakit.sync import packing as sync_packing


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90), nn.Linear(90, 3)).bfloat16()


def move(net: nn.Module, share: float = 0.03) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.where(torch.rand(p.shape) < share, p.abs() / 64, 0.0))


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in net.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(x.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)) for name, x in a.items()
    )


def test_subscribers_follow_whatever_they_missed(tmp_path):
    trained, early, late = model(), model(1), model(2)
    publisher, follower = bk.sync.Publisher(trained, tmp_path), bk.sync.Subscriber(early, tmp_path)
    assert follower.update() == -1
    for version in range(6):
        assert publisher.publish() == version
        if version % 2 == 0:
            assert follower.update() == version
            assert same(state(early), state(trained))
        move(trained)
    assert publisher.publish() == 6
    newcomer = bk.sync.Subscriber(late, tmp_path)
    assert newcomer.update() == follower.update() == 6
    assert same(state(early), state(trained))
    assert same(state(late), state(trained))
    assert follower.update() == 6


def test_a_whole_copy_is_written_after_many_changes_and_what_is_old_removed(tmp_path):
    trained, served = model(), model(1)
    publisher = bk.sync.Publisher(trained, tmp_path, keep=0.5)
    for _ in range(20):
        publisher.publish()
        move(trained, 0.2)
    names = sorted(path.name for path in tmp_path.iterdir())
    copies = [name for name in names if name.endswith("-whole")]
    assert len(copies) == 2
    assert names[0] in (min(copies), min(copies).removesuffix("-whole"))
    follower = bk.sync.Subscriber(served, tmp_path)
    assert follower.update() == 19
    for name, x in publisher.copies.items():
        assert torch.equal(x, served.state_dict()[name])


def test_a_publisher_that_comes_back_goes_on_with_a_whole_copy(tmp_path):
    trained, served = model(), model(1)
    follower = bk.sync.Subscriber(served, tmp_path)
    bk.sync.Publisher(trained, tmp_path).publish()
    follower.update()
    (tmp_path / "unfinished-0").write_bytes(b"what a killed publisher left")
    move(trained)
    again = bk.sync.Publisher(trained, tmp_path)
    assert again.publish() == 1
    assert not list(tmp_path.glob("unfinished-*"))
    assert follower.update() == 1
    assert same(state(served), state(trained))


def test_damaged_and_missing_files_are_named_and_nothing_is_applied(tmp_path):
    trained, served = model(), model(1)
    publisher, follower = bk.sync.Publisher(trained, tmp_path), bk.sync.Subscriber(served, tmp_path)
    for _ in range(3):
        publisher.publish()
        move(trained)
    before = state(served)
    file, other = (tmp_path / f"00000000{version}-{publisher.run}" for version in (2, 1))
    right = file.read_bytes()
    for at in (0, 20, len(right) // 2, len(right) - 1):
        file.write_bytes(right[:at] + bytes([right[at] ^ 64]) + right[at + 1 :])
        with pytest.raises(ValueError, match=rf"{file.name}.*: .*(damaged|cut off)"):
            follower.update()
    file.write_bytes(right[:-5])
    with pytest.raises(ValueError, match=rf"{file.name}.*: .*(damaged|cut off)"):
        follower.update()
    file.write_bytes(right)
    other.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"has version 2, and no .*000000001"):
        follower.update()
    assert same(state(served), before)
    (tmp_path / "elsewhere").rename(other)
    assert follower.update() == 2


def test_versions_of_another_publisher_are_told_apart_by_more_than_their_numbers(tmp_path):
    """A folder that has been emptied has versions of the same numbers again: their changes fit other values."""
    served, folder = model(1), tmp_path / "weights"
    follower = bk.sync.Subscriber(served, folder)
    for seed, versions in ((0, 4), (5, 2), (6, 4), (7, 7)):
        trained = model(seed)
        publisher = bk.sync.Publisher(trained, folder)
        for version in range(versions):
            move(trained)
            assert publisher.publish() == version
        assert follower.update() == versions - 1
        assert same(state(served), state(trained))
        shutil.rmtree(folder)
        del publisher


def test_names_shapes_and_dtypes_are_checked(tmp_path):
    bk.sync.Publisher({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path).publish()
    for tensors, words in (
        ({"a": torch.zeros(3), "c": torch.zeros(1)}, "'c' is not published; published are 'a', 'b'"),
        ({"a": torch.zeros(3)}, "'b' is published and not followed here"),
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, r"'b' is a tensor \(4,\) .* published is float32 \(2, 2\)"),
        ({"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros(2, 2)}, "published is float32"),
    ):
        with pytest.raises(ValueError, match=words):
            bk.sync.Subscriber(tensors, tmp_path).update()
    some = {"b": torch.zeros(2, 2)}
    bk.sync.Subscriber(some, tmp_path, some=True).update()
    assert torch.equal(some["b"], torch.ones(2, 2))
    with pytest.raises(TypeError, match="a module, or tensors by name"):
        bk.sync.Subscriber([torch.zeros(3)], tmp_path)
    with pytest.raises(TypeError, match=r"tensors\['a'\] is a tensor, not 3"):
        bk.sync.Publisher({"a": 3}, tmp_path)
    with pytest.raises(TypeError, match="a folder or a Comm"):
        bk.sync.Publisher({"a": torch.ones(3)}, 3)


def test_slices_of_a_matrix_are_followed_under_other_names(tmp_path):
    fused = torch.randn(12, 8)
    publisher = bk.sync.Publisher({f"rank{r}.q": fused[4 * r : 4 * r + 4] for r in range(3)}, tmp_path)
    mine = torch.zeros(4, 16)[:, ::2]
    follower = bk.sync.Subscriber({"rank1.q": mine}, tmp_path, some=True)
    for _ in range(3):
        fused[5] += 1
        publisher.publish()
        follower.update()
        assert torch.equal(mine, fused[4:8])


def test_a_tensor_that_was_changed_here_is_not_lost_in_silence(tmp_path):
    trained, served = model(), model(1)
    publisher, follower = bk.sync.Publisher(trained, tmp_path), bk.sync.Subscriber(served, tmp_path)
    publisher.publish()
    follower.update()
    move(served)
    publisher.publish()
    with pytest.raises(RuntimeError, match="changed or moved since the last update"):
        follower.update()


def test_a_folder_has_one_publisher(tmp_path):
    first = bk.sync.Publisher(model(), tmp_path)
    with pytest.raises(RuntimeError, match="another publisher writes to"):
        bk.sync.Publisher(model(), tmp_path)
    assert first.publish() == 0


def test_after_a_version_that_could_not_be_written_comes_a_whole_copy(tmp_path, monkeypatch):
    trained, served = model(), model(1)
    publisher, follower = bk.sync.Publisher(trained, tmp_path), bk.sync.Subscriber(served, tmp_path)
    publisher.publish()
    follower.update()
    move(trained)
    with monkeypatch.context() as full:
        full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            publisher.publish()
    move(trained)
    assert publisher.publish() == 2
    assert follower.update() == 2
    assert same(state(served), state(trained))


def test_packets_of_an_earlier_format_are_refused_until_a_whole_copy_comes(tmp_path, monkeypatch):
    trained, served = model(), model(1)
    with monkeypatch.context() as earlier:
        earlier.setattr("baguakit.sync.versions.FORMAT", 1)
        publisher = bk.sync.Publisher(trained, tmp_path)
        publisher.publish()
    follower = bk.sync.Subscriber(served, tmp_path)
    with pytest.raises(ValueError, match="another version of baguakit has written this packet"):
        follower.update()
    del publisher
    bk.sync.Publisher(trained, tmp_path).publish()
    assert follower.update() == 1
    assert same(state(served), state(trained))


HOSTILE = (torch.bool, torch.int8, torch.int16, torch.int64, torch.float32, torch.bfloat16, torch.complex128)


def hostile(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of any bits, one of which is strided."""
    source = torch.Generator().manual_seed(seed)
    drawn = {}
    for dtype in HOSTILE:
        bits = torch.randint(-128, 128, (9000 * dtype.itemsize,), generator=source, dtype=torch.int8)
        drawn[str(dtype)] = bits % 2 == 0 if dtype == torch.bool else bits.view(dtype)
    return drawn | {"strided": torch.rand(60, 50, generator=source).t()}


def mixed(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], every: int) -> dict[str, torch.Tensor]:
    def changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where((torch.arange(x.numel()) % every == 0).view_as(x), y, x)

    return {name: changed(x, b[name]) for name, x in a.items()}


@pytest.mark.parametrize("parts", [1 << 23, 1 << 13])
def test_changes_that_were_applied_early_are_taken_back(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("baguakit.sync.versions.RANGE", parts)
    trained, first = hostile(0), hostile(0)
    publisher = bk.sync.Publisher(trained, tmp_path, keep=9)
    publisher.publish()
    early, late = (hostile(5) for _ in range(2))
    followers = [bk.sync.Subscriber(x, tmp_path, early=x is early) for x in (early, late)]
    assert [one.update() for one in followers] == [0, 0]
    for version, every in ((1, 50), (2, 2)):
        for name, x in mixed(trained, hostile(version), every).items():
            trained[name].copy_(x)
        publisher.publish()
    signs = []

    def add_(x, part, sign=1):
        signs.append(sign)
        return sync_packing.add_(x, part, sign)

    monkeypatch.setattr("baguakit.sync.versions.add_", add_)
    newest = max(tmp_path.glob("000000002*"))
    right = newest.read_bytes()
    for at in (len(right) - 1, len(right) // 2, 20):
        newest.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        for one, x in zip(followers, (early, late), strict=True):
            with pytest.raises(ValueError, match=r"damaged|cut off"):
                one.update()
            assert one.version == 0
            assert same(x, first)
    assert signs.count(-1) == signs.count(1) >= 3 * len(HOSTILE)  # those of version 1, three times
    newest.write_bytes(right[:-9])
    with pytest.raises(ValueError, match="cut off"):
        followers[0].update()
    assert same(early, first)
    newest.write_bytes(right)
    early["strided"].add_(0)
    with pytest.raises(RuntimeError, match="changed or moved"):
        followers[0].update()
    followers[0]._written = None  # nothing has changed, only the count
    assert [one.update() for one in followers] == [2, 2]
    assert same(early, trained)
    assert same(late, trained)


def test_zstd_makes_packets_shorter(tmp_path):
    pytest.importorskip("zstandard")
    sent = []
    for zstd in (0, 3):
        trained, served = model(), model(1)
        publisher = bk.sync.Publisher(trained, tmp_path / str(zstd), keep=9, zstd=zstd)
        follower = bk.sync.Subscriber(served, tmp_path / str(zstd))
        for _ in range(3):
            publisher.publish()
            follower.update()
            assert same(state(served), state(trained))
            move(trained, 0.2)
        sent.append(sum(path.stat().st_size for path in (tmp_path / str(zstd)).iterdir()))
    assert sent[1] < 0.9 * sent[0]


def test_each_flipped_byte_of_what_zstd_has_compressed_is_refused(tmp_path):
    pytest.importorskip("zstandard")
    new, there = {"x": torch.arange(300.0)}, {"x": torch.zeros(300)}
    bk.sync.Publisher(new, tmp_path, zstd=1).publish()
    (path,) = tmp_path.glob("0*")
    right = path.read_bytes()
    follower = bk.sync.Subscriber(there, tmp_path)
    for at in range(len(right)):
        path.write_bytes(right[:at] + bytes([right[at] ^ (1 + at % 255)]) + right[at + 1 :])
        with pytest.raises(ValueError, match=r"damaged|cut off"):
            follower.update()
        assert not there["x"].any()
    path.write_bytes(right)
    follower.update()
    assert torch.equal(there["x"], new["x"])


def test_zstd_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="zstd= needs the zstandard package: pip install zstandard"):
        bk.sync.Publisher(model(), tmp_path, zstd=1)
    with pytest.raises(ValueError, match="zstd"):
        bk.sync.Publisher(model(), tmp_path, zstd=23)
