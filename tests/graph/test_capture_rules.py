"""What makes recording safe: nothing allocated, nothing read by the host, no stream but the current one."""

import pytest
import torch
from captured import Captured, Setup, allocations, assert_same_bits, host_reads_raise
from cases import SM_SCALE

from treemla import MaskLayout, SlotTable, pack_tree_mask, verify_attention

SMALL = Setup(layout=MaskLayout.QLEN_ONLY, max_context=4096, pool_slots=20_000)


@pytest.fixture(scope="module")
def captured(device: torch.device) -> Captured:
    made = Captured(SMALL, device)
    made.load([100, 2, 33], seed=1)
    made.capture()
    return made


def pointers(captured: Captured) -> list[int]:
    held = [*captured.static_inputs.values(), *captured.plan.tensors, captured.words, *sum(captured.outputs, ())]
    return [tensor.data_ptr() for tensor in held]


def test_a_step_allocates_nothing_and_the_host_reads_nothing(captured: Captured) -> None:
    """Eagerly, where torch can see both."""
    captured.load([4096, 1, 0, 70], seed=2)
    before = allocations()
    with host_reads_raise():
        captured.run(captured.eager_plan, captured.eager_outputs)
    assert allocations() == before


def test_replays_allocate_nothing_and_move_no_pointer(captured: Captured) -> None:
    captured.load([31, 32], seed=3)
    before, held = allocations(), pointers(captured)
    for _ in range(10):
        captured.graph.replay()
    torch.cuda.synchronize()
    assert allocations() == before
    assert pointers(captured) == held


def test_memory_freed_between_replays_may_be_scribbled_over(captured: Captured) -> None:
    """A recording that kept a temporary's address would read the scribble."""
    captured.load([500, 64, 1], seed=4)
    first = captured.replay()
    for kilobytes in (1, 64, 2048, 65_536):
        blocks = [torch.full((kilobytes * 256,), torch.nan, device=captured.device) for _ in range(8)]
        del blocks
        assert_same_bits(captured.replay(), first, f"after {kilobytes} KiB blocks were freed")


def test_replay_beside_work_on_another_stream(captured: Captured) -> None:
    captured.load([4096, 300], seed=5)
    expected = captured.replay()
    side = torch.cuda.Stream()
    factor = torch.randn(2048, 2048, device=captured.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        product = factor
        for _ in range(200):
            product = product @ factor * 1e-2
    for _ in range(5):
        assert_same_bits(captured.replay(), expected, "beside matrix products on a side stream")
    torch.cuda.synchronize()


def test_replay_and_eager_on_a_side_stream(captured: Captured) -> None:
    """The kernels follow torch's current stream: inputs that a slow kernel of that stream writes last are seen."""
    captured.load([400, 3, 77], seed=6)
    expected = captured.replay()
    captured.check_against_oracle(expected)  # a recording that missed the kernels would agree with itself
    q = [held.clone() for held in captured.q]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for run in (captured.replay, captured.eager):
        with torch.cuda.stream(side):
            for held in captured.q:
                held.zero_()
            torch.cuda._sleep(20_000_000)
            for held, value in zip(captured.q, q, strict=True):
                held.copy_(value)
            results = run()
        side.synchronize()
        assert_same_bits(results, expected, "on a side stream")


@pytest.mark.timeout(120, method="thread")
def test_a_thousand_replays_with_changing_lengths(captured: Captured) -> None:
    """No hang, and each answer is that of its lengths. Lengths change inside rows of 4,096 readable slots."""
    captured.load([4096] * 4, seed=7)
    random = torch.Generator().manual_seed(8)
    choices = torch.randint(0, 4097, (16, 4), generator=random)
    choices[0], choices[1], choices[2], choices[3] = 0, 1, torch.tensor([37, 0, 0, 0]), torch.tensor([1, 4096, 31, 32])
    choices = choices.to(captured.device, captured.seq_lens.dtype)
    expected = []
    for lengths in choices:
        captured.seq_lens.copy_(lengths)
        expected.append(captured.eager())
    results = [tensor for pair in captured.outputs for tensor in pair]
    for i in range(1000):
        which = i * 7 % 16
        captured.seq_lens.copy_(choices[which])
        captured.graph.replay()
        assert_same_bits(results, expected[which], f"replay {i} with lengths {choices[which].tolist()}")


def test_words_packed_before_replay_with_padding_said(captured: Captured) -> None:
    """As SGLang does: a new mask tensor a step is packed into static words; update and verify are recorded."""
    static = Captured(SMALL, captured.device)

    def step() -> None:
        static.plan.update(static.seq_lens, static.slots)
        for q, kv, (out, lse) in zip(static.q, static.kv, static.outputs, strict=True):
            verify_attention(q, kv, static.slots, static.words, static.plan, sm_scale=SM_SCALE, out=out, lse=lse)

    static.load([64, 64, 64, 64], seed=9)
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(static.graph):
        step()
    for lengths in ([300, 5], [4096], [1, 2, 3, 4]):
        static.load(lengths, seed=10 + len(lengths))
        padding = SMALL.batch - len(lengths)
        mask = torch.cat(
            [static.mask[: len(lengths) * SMALL.tree_tokens**2], torch.ones(500, dtype=torch.bool, device="cuda")]
        )
        pack_tree_mask(mask, static.seq_lens, static.words, MaskLayout.QLEN_ONLY, num_padding=padding)
        results = [tensor for pair in static.outputs for tensor in pair]
        for result in results:
            result.fill_(torch.nan)
        static.graph.replay()
        static.check_against_oracle(results)


def test_value_check_refuses_to_be_captured(captured: Captured) -> None:
    captured.load([10, 20, 30], seed=11)
    graph = torch.cuda.CUDAGraph()
    call = {"plan": captured.plan, "sm_scale": SM_SCALE, "check_values": True}

    def record() -> None:
        with torch.cuda.graph(graph):
            captured.run(captured.plan, captured.outputs)
            verify_attention(captured.q[0], captured.kv[0], captured.slots, captured.words, **call)

    with pytest.raises(ValueError, match="check_values: expected False while a CUDA graph is captured, got True"):
        record()
    torch.cuda.synchronize()


def test_value_check_reads_the_device(captured: Captured) -> None:
    """Outside a capture: right values pass, a word above the diagonal and a slot outside the pool are named."""
    captured.load([10, 20, 30], seed=12)
    captured.run(captured.plan, captured.outputs)
    call = {"plan": captured.plan, "sm_scale": SM_SCALE, "check_values": True}
    q, kv, slots, words = captured.q[0], captured.kv[0], captured.slots, captured.words.clone()
    verify_attention(q, kv, slots, words, **call)
    assert isinstance(slots, SlotTable)
    words[0] = 3
    with pytest.raises(ValueError, match="words: expected bit 0 and no higher one in word 0"):
        verify_attention(q, kv, slots, words, **call)
    with pytest.raises(ValueError, match="slots of request"):
        verify_attention(q, kv[:5], slots, captured.words, **call)
