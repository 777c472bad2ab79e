"""The pool of weights: equal tensors of several processes are one, whatever happens to a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fovea.kernels import shared
from fovea.kernels.codes import CodedProduct, Codes
from fovea.kernels.shared import ALIGN, HEAD, LEAST_BYTES, WeightPool, keep, keep_parameters, use_pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pool is a memfd")
CAPACITY = 1 << 26


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    use_pool(None)
    os.close(descriptor)


def tensor(seed: int = 0, rows: int = 300) -> Tensor:
    return torch.randn(rows, 100, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pool(file: int, **options: object) -> WeightPool:
    return WeightPool(file, capacity=CAPACITY, **options)  # type: ignore[arg-type]


def test_equal_tensors_are_one(file: int) -> None:
    first, second = pool(file), pool(file)  # two processes have two of them
    one = first.keep(tensor(1))
    size = first.nbytes
    other = second.keep(tensor(1))
    assert torch.equal(one, tensor(1))
    assert torch.equal(other, tensor(1))
    assert one.dtype is torch.bfloat16
    assert second.nbytes == size
    assert first.keep(tensor(2)).data_ptr() != one.data_ptr()
    assert first.nbytes > size
    assert one.data_ptr() % ALIGN == 0
    assert first.keep(one) is one


OTHER = """
import os, signal, sys, torch
from fovea.kernels import shared

def tensor(seed, rows=300):
    return torch.randn(rows, 100, generator=torch.Generator().manual_seed(seed)).bfloat16()

pool = shared.WeightPool(int(sys.argv[1]), capacity=int(sys.argv[2]))
before = pool.nbytes
assert torch.equal(pool.keep(tensor(1)), tensor(1))
assert pool.nbytes == before
pool.keep(tensor(2))
print(pool.nbytes, flush=True)
write = shared._write

def killed(file, data, place):
    write(file, memoryview(data)[: len(data) // 2], place)
    if len(data) > 1000:
        os.kill(os.getpid(), signal.SIGKILL)

shared._write = killed
pool.keep(tensor(3, rows=500))
"""


@pytest.mark.slow
def test_another_process_shares_tensors_and_is_killed_while_it_writes_one(file: int) -> None:
    mine = pool(file)
    kept = mine.keep(tensor(1))
    done = subprocess.run(
        [sys.executable, "-c", OTHER, str(file), str(CAPACITY)],
        pass_fds=(file,),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    size = int(done.stdout)
    assert torch.equal(mine.keep(tensor(2)), tensor(2))
    assert mine.nbytes == size
    assert os.fstat(file).st_size > size  # the other one had begun to write
    other = pool(file)  # the lock is free, and the next entry is written over the incomplete one
    for each in (tensor(4), tensor(3, rows=500), tensor(1)):
        assert torch.equal(other.keep(each), each)
        assert torch.equal(mine.keep(each), each)
    assert mine.keep(tensor(1)).data_ptr() == kept.data_ptr()


def test_a_write_that_breaks_off_leaves_the_index_whole(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = pool(file), pool(file)
    kept, write = mine.keep(tensor(1)), shared._write
    size = mine.nbytes

    def broken(descriptor: int, data: bytes | memoryview, place: int) -> None:
        write(descriptor, memoryview(data)[: len(data) // 2], place)
        if len(data) > 1000:
            raise KeyboardInterrupt

    monkeypatch.setattr(shared, "_write", broken)
    with pytest.raises(KeyboardInterrupt):
        mine.keep(tensor(2))
    monkeypatch.setattr(shared, "_write", write)
    assert mine.nbytes == size
    assert os.fstat(file).st_size > size
    for each in (tensor(3), tensor(2), tensor(1)):
        assert torch.equal(other.keep(each), each)
        assert torch.equal(mine.keep(each), each)
    assert mine.keep(tensor(1)).data_ptr() == kept.data_ptr()


def test_tensors_with_one_hash_are_told_apart_by_their_bytes(file: int) -> None:
    same = pool(file, digest=lambda data: b"same" * 4)
    tensors = [tensor(seed) for seed in range(3)]
    places = [same.keep(each).data_ptr() for each in tensors]
    assert len(set(places)) == 3
    again = [same.keep(each.clone()) for each in tensors]
    assert [each.data_ptr() for each in again] == places
    assert all(torch.equal(one, other) for one, other in zip(tensors, again, strict=True))


def test_equal_bytes_of_another_shape_and_type_share_memory(file: int) -> None:
    mine = pool(file)
    one, other = mine.keep(tensor(1)), mine.keep(tensor(1).view(torch.int16).view(100, 300))
    assert one.data_ptr() == other.data_ptr()
    assert other.shape == (100, 300)
    assert other.dtype is torch.int16


def test_what_cannot_be_in_the_pool_stays(file: int) -> None:
    mine = pool(file)
    small = torch.zeros(LEAST_BYTES // 4 - 1)
    turned = tensor(1).T
    assert mine.keep(small) is small
    assert mine.keep(turned) is turned
    large = torch.zeros(CAPACITY // 4)
    assert mine.keep(large) is large
    assert mine.nbytes == ALIGN


def test_a_file_of_others_is_no_pool(file: int) -> None:
    os.write(file, b"x" * 4096)
    with pytest.raises(ValueError, match="no pool"):
        pool(file)


def test_a_write_error_leaves_tensors_private(
    file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = pool(file)
    kept = mine.keep(tensor(1))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared, "_write", full)
    private = tensor(2)
    assert mine.keep(private) is private
    assert "No space left" in caplog.text
    assert mine.keep(tensor(1)).data_ptr() == kept.data_ptr()
    assert HEAD.size < ALIGN


def test_without_a_pool_nothing_is_kept(file: int) -> None:
    plain = tensor(1)
    assert keep(plain) is plain
    layer = nn.Linear(200, 200)
    weight = layer.weight.data_ptr()
    keep_parameters([layer])
    assert layer.weight.data_ptr() == weight


def test_parameters_and_codes_are_kept(file: int) -> None:
    mine = pool(file)
    use_pool(mine)
    layer, twin = nn.Linear(200, 200), nn.Linear(200, 200)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 200)
    expected = layer(x)
    keep_parameters([layer, twin])
    assert layer.weight.data_ptr() == twin.weight.data_ptr()
    assert torch.equal(layer(x), expected)
    size = mine.nbytes
    codes = Codes(torch.randint(0, 255, (200, 128), dtype=torch.uint8), 8, 128, torch.ones(200, 1), 128)
    products = [CodedProduct([codes], None, None, False) for _ in range(2)]
    assert size < mine.nbytes < size + 2 * codes.codes.nbytes
    x = torch.randn(3, 128)
    assert torch.equal(products[0](x, None), products[1](x, None))


def test_loaded_models_share_their_weights(file: int) -> None:
    """The model in the pool answers as one that is not, and a second one adds nothing."""
    from fovea.engine.config import EngineConfig
    from fovea.engine.load import load_model

    private = load_model("fovea-tiny", EngineConfig.of(threads=1)).model
    mine = pool(file)
    use_pool(mine)
    first = load_model("fovea-tiny", EngineConfig.of(threads=1)).model
    size = mine.nbytes
    second = load_model("fovea-tiny", EngineConfig.of(threads=1)).model
    assert mine.nbytes == size
    hidden = torch.randn(2, first.decoder.config.hidden).to(first.dtype)
    assert torch.equal(private.logits(hidden), first.logits(hidden))
    assert torch.equal(first.logits(hidden), second.logits(hidden))


def test_the_mapping_is_read_only(file: int) -> None:
    """A defect that writes into a weight ends its own process, and does not change the weights of others."""
    address = pool(file).keep(tensor(1)).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            assert line.split()[1] == "r--s"
            return
    raise AssertionError("it is not mapped")
