"""The faults of vLLM that we patch (vllm_patches.py): each patch is right, and still needed.

A fault that a later version mends has a `fault` in its row: the patch is applied only where that
finds the fault. Here FAULTY names the versions that have it. If none of the tested versions has it
any more, a test fails, and the patch can be deleted.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.layers.mamba.mamba_utils import (
    get_conv_copy_spec,
    get_conv_state_layout,
    get_temporal_copy_spec,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from cfg_core.patching import stock
from cfg_core.vllm_plugin.core import remote_queues
from cfg_core.vllm_plugin.versions.tested import TESTED
from cfg_core.vllm_plugin.vllm_patches import PATCHES
from cfg_core.vllm_plugin.worker.cpu_faults import (
    expand_batch_to_tokens,
    filled_up,
    make_bgmv_shrink,
    make_get_kv_cache_spec,
    make_run_fused_postprocess,
    make_run_fused_precopy,
    make_spec_forward,
    returns_last_state_only,
    takes_last_adapter,
)

STOCK = {patch.attribute: stock(patch) for patch in PATCHES}
"""The stock functions, even if an earlier test of this process has applied our patches."""

dequeue = remote_queues.dequeue(STOCK["dequeue"])
bgmv_shrink = make_bgmv_shrink(STOCK["bgmv_shrink"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_repeated_for_the_drafts_of_their_request(dtype):
    values = torch.tensor([3, 0, 7], dtype=dtype)
    expanded = expand_batch_to_tokens(values, torch.tensor([2, 2, 5], dtype=torch.int32), 5)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [3, 3, 7, 7, 7]


def test_a_value_can_be_replaced():
    """vLLM does so with a greedy request's temperature, by which it must not divide."""
    expanded = expand_batch_to_tokens(
        torch.tensor([0.0, 0.5]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1
    )
    assert expanded.tolist() == [1.0, 0.5, 0.5]


def test_stock_vllm_still_has_the_fault():
    """If this test fails, vLLM has fixed the fault: delete our patch."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    if not hasattr(torch.ops._C, "expand_kernel_impl"):
        pytest.skip("the fault is that of vLLM's CPU kernel, which this build has not")
    output = torch.full((3,), -1.0)
    _expand_kernel_impl(output, torch.tensor([0.5, 0.7]), torch.tensor([1, 3]), 0, 1)
    assert output.tolist() == [-1.0, -1.0, -1.0]


ADAPTERS = torch.tensor([0, -1, 1])


def shrunk(shrink):
    inputs, weights = torch.ones(3, 4), torch.ones(2, 1, 2, 4)
    output = torch.full((3, 2), 9.0)
    shrink(inputs, weights, output, ADAPTERS, 0.5)
    return output.tolist()


def test_a_token_without_an_adapter_takes_none():
    assert shrunk(bgmv_shrink) == [[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]]


FAULTY = {"0.31", "0.32"}
"""The versions in which a token without an adapter takes the last one."""


def test_the_patch_of_adapters_applies_where_the_fault_is():
    stock_is_wrong = shrunk(STOCK["bgmv_shrink"]) == [[2.0, 2.0]] * 3
    assert stock_is_wrong == takes_last_adapter(STOCK["bgmv_shrink"])
    assert stock_is_wrong == (vllm.__version__.rpartition(".")[0] in FAULTY)


def test_a_tested_version_still_needs_the_patch_of_adapters():
    assert FAULTY & {*TESTED}, "delete make_bgmv_shrink, takes_last_adapter and their two rows"


def test_a_mamba2_layer_on_a_cpu_promises_no_state_inside_of_a_chunk():
    promised = MambaSpec(
        block_size=16,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    spec = make_get_kv_cache_spec(lambda layer, config: promised)(None, None)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (0, None)
    assert spec.shapes == promised.shapes


def test_stock_mamba2_on_a_cpu_still_has_the_fault():
    """If this test fails, vLLM has fixed the fault: delete make_get_kv_cache_spec and its row."""
    if not hasattr(torch.ops._C, "mamba_chunk_scan_fwd_cpu"):
        pytest.skip("the fault is that of vLLM's CPU kernel, which this build has not")
    assert returns_last_state_only(STOCK["get_kv_cache_spec"])


def test_shorter_sequences_are_filled_up_with_their_last_token():
    source, own = filled_up(torch.tensor([0, 1, 4]), 3)
    assert source.tolist() == [0, 0, 0, 1, 2, 3]
    assert own.tolist() == [True, False, False, True, True, True]


class DeltaNet:
    """One sequence in a gated delta net of one head, with up to three drafts."""

    WIDTH, MOST, SIZE = 4, 4, 128

    def __init__(self, forward):
        generator = torch.Generator().manual_seed(0)
        self.forward = forward
        rows = 3 * self.SIZE
        weight = torch.randn(rows, 1, self.WIDTH, generator=generator).bfloat16()
        self.layer = SimpleNamespace(
            conv1d=SimpleNamespace(weight=weight, bias=None),
            activation="silu",
            A_log=torch.zeros(1),
            dt_bias=torch.zeros(1, dtype=torch.bfloat16),
            rearrange_mixed_qkv=lambda qkv: [
                part.reshape(1, -1, 1, self.SIZE).contiguous() for part in qkv.split(self.SIZE, -1)
            ],
        )
        self.state_len = self.WIDTH - 2 + self.MOST
        self.conv_buf = torch.zeros(self.MOST + 1, rows, self.state_len, dtype=torch.bfloat16)
        self.states = torch.zeros(self.MOST + 1, 1, self.SIZE, self.SIZE)
        self.tokens = torch.randn(8, rows, generator=generator).bfloat16()
        self.accepted, self.place = 1, 0

    def step(self, number):
        """The outputs for the next tokens, which are all accepted."""
        rows = self.tokens[self.place : self.place + number]
        metadata = GDNAttentionMetadata(
            **dict.fromkeys(
                ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens"), 0
            ),
            num_spec_decodes=1,
            num_spec_decode_tokens=number,
            num_actual_tokens=number,
            spec_state_indices_tensor=torch.arange(1, 1 + self.MOST).unsqueeze(0),
            spec_query_start_loc=torch.tensor([0, number], dtype=torch.int32),
            num_accepted_tokens=torch.tensor([self.accepted], dtype=torch.int32),
        )
        gates = torch.zeros(number, 1, dtype=torch.bfloat16)
        where = (self.conv_buf, self.states, self.WIDTH, self.state_len)
        self.place, self.accepted = self.place + number, number
        return self.forward(self.layer, metadata, rows, gates, gates, *where)


@pytest.fixture
def without_tiles(monkeypatch):
    """Another kernel is used on a CPU with AMX. Its weights are packed."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def test_a_gated_delta_net_takes_shorter_sequences(without_tiles):
    """Steps of four, one and three tokens give what two steps of four give."""
    whole, parts = (
        DeltaNet(STOCK["_spec_forward"]),
        DeltaNet(make_spec_forward(STOCK["_spec_forward"])),
    )
    expected = torch.cat([whole.step(4), whole.step(4)])
    found = torch.cat([parts.step(4), parts.step(1), parts.step(3)])
    assert expected.abs().mean() > 1e-3
    assert torch.allclose(found, expected, atol=1e-2, rtol=1e-2)


def test_stock_gated_delta_nets_still_take_no_shorter_sequence(without_tiles):
    """If this test fails, vLLM has fixed the fault: delete make_spec_forward and its row."""
    net = DeltaNet(STOCK["_spec_forward"])
    net.step(4)
    with pytest.raises(RuntimeError, match="must match the size"):
        net.step(1)


class CachedStates:
    """Two requests of a model with one recurrent layer, whose blocks have four tokens."""

    COPIED = (get_conv_copy_spec, get_temporal_copy_spec)
    TABLE = torch.tensor([[3, 1, 4, 2, 5], [9, 8, 6, 7, 10]], dtype=torch.int32)

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.states = [torch.randn(11, 5, 3, generator=generator) for _ in self.COPIED]
        spec = MambaSpec(
            block_size=4,
            shapes=((5, 3), (5, 3)),
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode="align",
            num_speculative_blocks=2,
        )
        config = KVCacheConfig(11, [], [KVCacheGroupSpec(["layer"], spec)])
        functions = {spec.mamba_type: self.COPIED}
        self.context = MambaSpecDecodeGPUContext.create(
            max_num_reqs=2,
            kv_cache_config=config,
            copy_funcs=functions,
            device=torch.device("cpu"),
            make_buffer=lambda *size, dtype: CpuGpuBuffer(
                *size, dtype=dtype, device=torch.device("cpu"), pin_memory=False
            ),
        )
        layers = {"layer": SimpleNamespace(kv_cache=self.states)}
        self.context.initialize_from_forward_context(config, layers, functions, [self.TABLE])

    def precopy(self, function, sources, targets, tokens):
        columns = (torch.tensor(x, dtype=torch.int32) for x in (targets, sources, tokens))
        function(self.context, 2, *columns, None)

    def copied(self, request, source, target, tokens):
        """What the states are after one copy: the window is shifted, and a state has a block."""
        blocks = self.TABLE[request].tolist()
        window, state = (state.clone() for state in self.states)
        # a view as [blocks, tokens, channels]
        window_view = window.mT if get_conv_state_layout() == "DS" else window
        shifted = window_view[blocks[source], tokens:].clone()
        window_view[blocks[target], : len(shifted)] = shifted
        state[blocks[target]] = state[blocks[source + tokens]].clone()
        return [window, state]


def same(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.fixture(params=["SD", "DS"])
def cached_states(request, monkeypatch):
    """With each layout of a convolution's inputs: by tokens, and by channels."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield CachedStates()
    get_conv_state_layout.cache_clear()


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_state_moves_on_with_its_sequence(cached_states, tokens):
    """The first request goes on in the next block. The second one stays in its own."""
    expected = cached_states.copied(0, 0, 1, tokens)
    assert not same(cached_states.states, expected)
    precopy = make_run_fused_precopy(STOCK["run_fused_precopy"])
    cached_states.precopy(precopy, [0, 1], [1, 1], [tokens, 1])
    assert same(cached_states.states, expected)


def test_the_state_at_the_end_of_a_block_is_kept(cached_states):
    """The first request has 6 tokens, and accepts 3 of 4: the state after 8 tokens is kept. The
    second one has 5 tokens, and accepts 2."""
    expected = cached_states.copied(0, 2, 1, 1)
    postprocess = make_run_fused_postprocess(STOCK["run_fused_postprocess"])
    columns = ([3, 2], [2, 2], [4, 4], [6, 5], [3, 3])
    postprocess(cached_states.context, 2, *(torch.tensor(x) for x in columns))
    assert same(cached_states.states, expected)
    assert cached_states.context.num_accepted_tokens_out.tolist() == [3, 2]


def test_a_step_that_ends_a_block_begins_the_next_one_with_its_only_state(cached_states):
    expected = cached_states.copied(1, 1, 1, 2)
    postprocess = make_run_fused_postprocess(STOCK["run_fused_postprocess"])
    columns = ([1, 3], [0, 1], [3, 3], [0, 5], [2, 2])
    postprocess(cached_states.context, 2, *(torch.tensor(x) for x in columns))
    assert same(cached_states.states, expected)
    assert cached_states.context.num_accepted_tokens_out.tolist() == [1, 1]


def test_stock_vllm_still_has_no_kernel_for_cached_states(cached_states):
    """If this test fails, vLLM has mended it: delete both functions and their rows."""
    if torch.cuda.is_available():
        pytest.skip("the fault is that of vLLM on a CPU")
    with pytest.raises((TypeError, RuntimeError)):
        cached_states.precopy(STOCK["run_fused_precopy"], [0, 1], [1, 1], [0, 0])


@pytest.fixture
def queues():
    """The two ends of a queue between machines."""
    writer = MessageQueue(n_reader=1, n_local_reader=0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join(10)
    return writer, reader


def test_a_wait_for_another_machine_ends_with_the_queue(queues):
    writer, reader = queues
    writer.enqueue({"tokens": [1, 2]})
    assert dequeue(reader, timeout=10) == {"tokens": [1, 2]}
    with pytest.raises(TimeoutError):
        dequeue(reader, timeout=0.3)
    timer = threading.Timer(0.3, reader.shutdown)
    timer.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        dequeue(reader)
    assert time.monotonic() - start < 5


def test_stock_vllm_still_waits_after_the_queue_has_ended(queues):
    """If this test fails, vLLM has fixed the fault: delete our patch."""
    _, reader = queues
    reader.shutdown()
    # The shutdown does not end the wait. By default it has no timeout.
    with pytest.raises(TimeoutError):
        STOCK["dequeue"](reader, timeout=0.3)
