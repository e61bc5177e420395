"""The pipeline from a device and back, over a link that copies late, and in the order that its streams would."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from provisioner.marlin.cases import Case, make_perm, random_words
from provisioner.marlin.layout import Activation, Layout, all_layouts, reference_repack
from provisioner.marlin.repack import RepackError, Staging, TorchEngine, repack_from_device

torch = pytest.importorskip("torch")


class LateStream:
    """Copies in the order in which they were queued, none before somebody waits for it or for a later one."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], object]] = []
        self._done = 0

    def queue(self, copy: Callable[[], object]) -> "LateCopy":
        self._queued.append(copy)
        return LateCopy(self, len(self._queued))

    def run_until(self, count: int) -> None:
        while self._done < count:
            self._queued[self._done]()
            self._done += 1

    def run_all(self) -> None:
        self.run_until(len(self._queued))


class LateCopy:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.run_until(self._number)


class LateLink:
    """A link whose copies happen as late as the interface allows, so that a missing wait gives wrong words."""

    def __init__(self) -> None:
        self.down = LateStream()
        self.up = LateStream()
        self.fetched: list[int] = []
        self.log: list[str] = []

    def begin(self) -> None:
        self.log.append("begin")

    def fetch(self, host: "torch.Tensor", device: "torch.Tensor") -> LateCopy:
        host.fill_(-1)  # whoever still needs the old content of this buffer sees it gone
        self.fetched.append(host.data_ptr())
        return self.down.queue(lambda: host.copy_(device))

    def send(self, device: "torch.Tensor", host: "torch.Tensor") -> LateCopy:
        return self.up.queue(lambda: device.copy_(host))

    def finish(self) -> None:
        self.log.append("finish")
        self.up.run_all()


def run(case: Case, words: np.ndarray, link: LateLink, *, block_bytes: int) -> np.ndarray:
    perm = make_perm(case)
    made = repack_from_device(
        case.layout.packing,
        torch.from_numpy(words.view(np.int32)),
        case.size_k,
        case.size_n,
        case.layout.bits,
        perm=None if perm is None else torch.from_numpy(perm),
        is_a_8bit=case.layout.activation is Activation.NARROW,
        engine=TorchEngine(),
        staging=Staging(link, block_bytes=block_bytes, pinned=False),
    )
    return made.numpy().view(np.uint32)


@pytest.mark.parametrize("layout", all_layouts(), ids=str)
@pytest.mark.parametrize("block_bytes", [1, 20_000, 1 << 20])
def test_blocks_of_any_size_give_the_reference(layout: Layout, block_bytes: int) -> None:
    case = Case(layout=layout, size_k=384, size_n=128)
    words = random_words(case)
    link = LateLink()
    assert np.array_equal(run(case, words, link, block_bytes=block_bytes), reference_repack(words, layout))
    assert link.log == ["begin", "finish"]


def test_four_buffers_are_enough_for_any_number_of_blocks() -> None:
    case = Case(layout=Layout(bits=8), size_k=640, size_n=64)
    link = LateLink()
    run(case, random_words(case), link, block_bytes=1024)
    assert len(link.fetched) == 40
    assert len(set(link.fetched)) == 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_bytes", [1, 20_000, 1 << 20])
def test_act_order_goes_through_the_same_buffers(bits: int, block_bytes: int) -> None:
    case = Case(layout=Layout(bits=bits), size_k=384, size_n=128, act_order=True)
    words = random_words(case)
    made = run(case, words, LateLink(), block_bytes=block_bytes)
    assert np.array_equal(made, reference_repack(words, case.layout, perm=make_perm(case)))


def test_experts_with_their_own_order() -> None:
    layout = Layout(bits=8)
    words = np.stack([random_words(Case(layout=layout, size_k=64, size_n=128), seed) for seed in range(3)])
    perms = np.stack([np.random.default_rng(seed).permutation(64).astype(np.int32) for seed in range(3)])
    made = repack_from_device(
        "gptq",
        torch.from_numpy(words.view(np.int32)),
        64,
        128,
        8,
        perm=torch.from_numpy(perms),
        engine=TorchEngine(),
        staging=Staging(LateLink(), block_bytes=2048, pinned=False),
    )
    expected = np.stack([reference_repack(w, layout, perm=p) for w, p in zip(words, perms, strict=True)])
    assert np.array_equal(made.numpy().view(np.uint32), expected)


def test_a_forgotten_wait_would_show() -> None:
    """The link itself is a check that can fail: without waiting, the buffer holds the poison and not the words."""
    link = LateLink()
    host, device = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    ticket = link.fetch(host, device)
    assert host.tolist() == [-1] * 4
    ticket.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_the_streams_are_joined_after_a_failure_too() -> None:
    class Broken(TorchEngine):
        def shuffle(self, *args: object, **kwargs: object) -> None:
            raise MemoryError("no room")

    link = LateLink()
    words = torch.zeros((16, 64), dtype=torch.int32)
    staging = Staging(link, pinned=False)
    with pytest.raises(MemoryError):
        repack_from_device("gptq", words, 64, 64, 8, engine=Broken(), staging=staging)
    assert link.log == ["begin", "finish"]
    repack_from_device("gptq", words, 64, 64, 8, engine=TorchEngine(), staging=staging)
    assert link.log == ["begin", "finish"] * 2


def test_one_weight_at_a_time() -> None:
    case = Case(layout=Layout(bits=8), size_k=256, size_n=128)
    staging = Staging(LateLink(), block_bytes=4096, pinned=False)
    results: dict[int, bool] = {}

    def load(seed: int) -> None:
        words = random_words(case, seed)
        made = repack_from_device(
            "gptq",
            torch.from_numpy(words.view(np.int32)),
            case.size_k,
            case.size_n,
            8,
            engine=TorchEngine(),
            staging=staging,
        )
        results[seed] = np.array_equal(made.numpy().view(np.uint32), reference_repack(words, case.layout))

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(6), True)


def test_what_cannot_be_repacked_is_refused_before_anything_moves() -> None:
    link = LateLink()
    with pytest.raises(RepackError, match="multiple of the tile's 32 rows"):
        repack_from_device(
            "gptq",
            torch.zeros((12, 64), dtype=torch.int32),
            48,
            64,
            8,
            is_a_8bit=True,
            engine=TorchEngine(),
            staging=Staging(link, pinned=False),
        )
    assert link.log == []
