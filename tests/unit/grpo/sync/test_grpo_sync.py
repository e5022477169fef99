"""After a sync the engine holds the trainer's weights bit by bit; or the sync failed, said so and moved no version."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcanary.contract.adapter import Item
from rlcanary.contract.engine import InProcessEngine
from rlcanary.errors import UserError
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.rollout.collector import Collector
from rlcanary.grpo.sync.sync import InProcessEndpoint, SyncError, fingerprint, sync_weights
from rlcanary.grpo.sync.transports import CopyTransport, pack, transport_of, unpack
from rlcanary.tiny_models import tiny_llama

LONG_PROMPT = list(range(5, 45))


@pytest.fixture
def engine() -> InProcessEngine:
    return InProcessEngine(tiny_llama())


def weights_are_equal(model: Any, engine: InProcessEngine) -> bool:
    pairs = zip(model.parameters(), engine.model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "kind",
    ["copy", "bytes", "file"],
)
def test_every_transport_brings_every_bit(engine: InProcessEngine, tmp_path: Path, kind: str) -> None:
    trainer = tiny_llama(seed=1)
    assert sync_weights(trainer, [InProcessEndpoint(engine)], transport_of(kind, tmp_path)) == 1
    assert weights_are_equal(trainer, engine)
    assert engine.version == 1
    assert list(tmp_path.iterdir()) == []


def test_weights_are_rounded_to_the_engines_dtype_before_they_are_compared(tmp_path: Path) -> None:
    engine = InProcessEngine(tiny_llama().to(torch.bfloat16))
    sync_weights(tiny_llama(seed=1), [InProcessEndpoint(engine)], transport_of("bytes", tmp_path))
    assert engine.version == 1


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_travel_once(tied: bool) -> None:
    engine = InProcessEngine(tiny_llama(tied=tied))
    trainer = tiny_llama(seed=1, tied=tied)
    sync_weights(trainer, [InProcessEndpoint(engine)], CopyTransport())
    assert torch.equal(engine.model.lm_head.weight, trainer.lm_head.weight)


def test_prefixes_of_the_old_weights_are_forgotten(engine: InProcessEngine) -> None:
    trainer = tiny_llama(seed=1)
    request = {"temperature": 0.0, "max_new_tokens": 4}
    engine.generate([LONG_PROMPT], request)
    sync_weights(trainer, [InProcessEndpoint(engine)], CopyTransport())
    (given,), (fresh,) = (
        engine.generate([LONG_PROMPT], request),
        InProcessEngine(trainer).generate([LONG_PROMPT], request),
    )
    assert given[0].logprobs == pytest.approx(fresh[0].logprobs, abs=1e-5)


def test_a_parameter_that_one_side_lacks_is_named_before_anything_moves(engine: InProcessEngine) -> None:
    trainer = tiny_llama(seed=1)
    before = copy.deepcopy(engine.model.state_dict())
    trainer.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(SyncError, match=r"only the trainer .*\.extra\.weight"):
        sync_weights(trainer, [InProcessEndpoint(engine)], CopyTransport())
    del trainer.model.extra, trainer.model.norm
    with pytest.raises(SyncError, match=r"engine .*model\.norm\.weight"):
        sync_weights(trainer, [InProcessEndpoint(engine)], CopyTransport())
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())
    assert engine.version == 0


def test_a_shape_that_differs_is_named(engine: InProcessEngine) -> None:
    with pytest.raises(SyncError, match=r"\(80, 32\) .* \(64, 32\)"):
        sync_weights(tiny_llama(vocabulary=80), [InProcessEndpoint(engine)], CopyTransport())


class Damaging(CopyTransport):
    """Loses, alters or breaks off what it carries, the first `times` times."""

    def __init__(self, how: str, times: int) -> None:
        self.how, self.times = how, times

    def deliver(self, parcel: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self.times -= 1
        for index, (name, weight) in enumerate(parcel):
            if self.times >= 0 and index == 4:
                if self.how == "lose":
                    continue
                if self.how == "alter":
                    weight = weight.clone()
                    weight.view(-1)[0] += 1e-6
                if self.how == "break":
                    raise ConnectionError("the line went dead")
            yield name, weight


@pytest.mark.parametrize(
    ("how", "said"),
    [("lose", "1 parameters are not as"), ("alter", "1 parameters are not as"), ("break", "the line went dead")],
)
def test_weights_that_do_not_arrive_move_no_version(engine: InProcessEngine, how: str, said: str) -> None:
    with pytest.raises(SyncError, match=said):
        sync_weights(tiny_llama(seed=1), [InProcessEndpoint(engine)], Damaging(how, times=2))
    assert engine.version == 0


@pytest.mark.parametrize("how", ["lose", "alter", "break"])
def test_a_second_try_repairs_an_engine_that_was_left_half_loaded(engine: InProcessEngine, how: str) -> None:
    trainer = tiny_llama(seed=1)
    sync_weights(trainer, [InProcessEndpoint(engine)], Damaging(how, times=1))
    assert weights_are_equal(trainer, engine)
    assert engine.version == 1


def test_no_replica_moves_on_unless_all_do(engine: InProcessEngine) -> None:
    other = InProcessEngine(tiny_llama(vocabulary=80))
    with pytest.raises(SyncError, match="engine 1"):
        sync_weights(tiny_llama(seed=1), [InProcessEndpoint(engine), InProcessEndpoint(other)], CopyTransport())
    assert (engine.version, other.version) == (0, 0)


def test_requests_stay_held_back_when_the_sync_fails(engine: InProcessEngine) -> None:
    items = ItemIterator([Item("one", [5, 6], lambda text: 1.0)])
    items.start_epoch()
    collector = Collector([engine], items, {"max_new_tokens": 2})

    async def sync(transport: CopyTransport) -> None:
        async with collector.paused():
            sync_weights(tiny_llama(seed=1), [InProcessEndpoint(engine)], transport)

    with pytest.raises(SyncError):
        asyncio.run(sync(Damaging("lose", 2)))
    assert collector.pool.is_paused
    asyncio.run(sync(CopyTransport()))
    assert not collector.pool.is_paused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_packing_keeps_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.randn(shape).to(dtype)
    name, got = unpack(pack("weight", given))
    assert (name, got.dtype, got.shape) == ("weight", dtype, given.shape)
    assert torch.equal(given, got)


def test_a_fingerprint_tells_dtype_shape_and_bits_apart() -> None:
    zero = torch.zeros(2, 3)
    others = [zero.t(), zero.bfloat16(), zero.flatten(), -zero]
    assert len({fingerprint(tensor) for tensor in [zero, *others]}) == 5
    assert fingerprint(zero.t().contiguous().t()) == fingerprint(zero)


def test_an_unknown_transport_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pigeon"):
        transport_of("pigeon", tmp_path)
