"""ViolinMask: values, gradients, initial values, kept tables, mistakes."""

import contextlib
import copy
import json
import math
import pickle

import pytest
import torch

import violin
from violin import _streams
from violin._safetensors import load_file


def test_ranks_are_the_golden_ones(golden):
    for path in sorted((golden / "curves").glob("*.json")):
        content = json.loads(path.read_text())
        grid = (content["height"], content["width"])
        for name, expected in content["rank"].items():
            assert violin.curves.ranks(name, grid).tolist() == expected, (path.name, name)


def test_sets_are_their_members():
    for name, members in violin.curves.SETS.items():
        together = torch.stack([violin.curves.ranks(member, (3, 5)) for member in members])
        assert torch.equal(violin.curves.ranks(name, (3, 5)).squeeze(1), together)
    assert violin.curves.names(["random:7", "morton"]) == ["random:7", "peano"]
    assert violin.curves.ranks("manhattan", (2, 3)).shape == (2, 6)
    for name in violin.curves.NAMES:
        violin.curves.ranks(name, (2, 2))
    with pytest.raises(violin.Error, match="hilbrt"):
        violin.curves.ranks("hilbrt", (2, 2))


def golden_cases(golden):
    return json.loads((golden / "attention" / "index.json").read_text())["cases"]


def test_golden_attention(golden):
    for case in golden_cases(golden):
        data, _ = load_file(golden / "attention" / case["file"])
        prefix = int(data["M"].shape[-1] - case["height"] * case["width"])
        fixed = "gamma" in data
        mask = violin.ViolinMask(
            data["q"].shape[1], case["curves"], grid=(case["height"], case["width"]), dtype=torch.float64,
            strategy=case["method"], alpha=case["alpha_learned"], decay=0.5 if fixed else None,
        )  # fmt: skip
        with torch.no_grad():
            (mask.gamma if fixed else mask.beta).copy_(data["gamma" if fixed else "beta"])
            if mask.alpha is not None:
                mask.alpha.copy_(data["alpha"])
        grid = (case["height"], case["width"])
        torch.testing.assert_close(mask.mask(grid, prefix), data["M"], rtol=1e-9, atol=1e-12)
        tables = mask.tables(grid, prefix)
        q, k, v = (data[name].double() for name in "qkv")
        out = violin.ops.attention(q, k, v, tables.gain, tables.bias, tables.gate, case["qk_scale"])
        if tables.after is not None:
            out = out + tables.after @ v
        torch.testing.assert_close(out, data["O"], rtol=1e-8, atol=1e-10)
        if fixed and mask.alpha is None:
            continue
        out.backward(data["dO"].double())
        if not fixed:
            torch.testing.assert_close(mask.beta.grad, data["dbeta"], rtol=1e-6, atol=1e-18)
        if mask.alpha is not None:
            torch.testing.assert_close(mask.alpha.grad, data["dalpha"], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("parameterisation", ["sigmoid", "rate"])
@pytest.mark.parametrize("options", [{}, {"curve_weights": True, "prefix_decay": "learned"},
                                     {"curves": "manhattan", "decay_per_axis": True}])  # fmt: skip
def test_gradients(parameterisation, options):
    mask = violin.ViolinMask(
        2, init="spread", grid=(2, 3), parameterisation=parameterisation, dtype=torch.float64, **options
    )
    names = [name for name, _ in mask.named_parameters()]
    with torch.no_grad():
        for parameter in mask.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.3 + 0.1)

    def table(*values):
        return torch.func.functional_call(mask, dict(zip(names, values)), ((2, 3), 1)).gain

    assert torch.autograd.gradcheck(table, [p.detach().clone().requires_grad_() for p in mask.parameters()])


def test_initial_values():
    heads, grid = 4, (14, 14)
    pretrain = violin.ViolinMask(heads, init="pretrain", grid=grid, seed=3)
    assert pretrain.beta.shape == (8, heads) and pretrain.beta.min() >= 5 and pretrain.beta.max() <= 9
    finetune = violin.ViolinMask(heads, init="finetune", grid=grid)
    assert finetune.beta.min() >= 15 and (finetune.alpha - 1).abs().max() < 0.2
    spread = violin.ViolinMask(heads, init="spread", grid=grid)
    lengths = -1 / spread.log_decay()[0]
    torch.testing.assert_close(lengths[0].item(), 4.0, rtol=1e-4, atol=0)
    torch.testing.assert_close(lengths[-1].item(), 196.0, rtol=1e-3, atol=0)
    for init in ("pretrain", "finetune", "none", "spread"):
        beta = violin.ViolinMask(heads, init=init, grid=grid, seed=5)
        rate = violin.ViolinMask(heads, init=init, grid=grid, seed=5, parameterisation="rate")
        if init == "spread":
            torch.testing.assert_close(rate.log_decay(), beta.log_decay(), rtol=1e-4, atol=1e-9)
        assert rate.rate.min() >= 0
    assert torch.equal(violin.ViolinMask(heads, seed=3, grid=grid).alpha, pretrain.alpha)
    assert not torch.equal(violin.ViolinMask(heads, seed=4, grid=grid).alpha, pretrain.alpha)


@pytest.mark.parametrize("strategy", violin.ops.STRATEGIES)
def test_identity_changes_nothing_and_learns(strategy):
    mask = violin.ViolinMask(2, init="identity", strategy=strategy, grid=(3, 4))
    q, k, v = torch.randn(3, 2, 2, 13, 8)
    tables = mask.tables((3, 4), prefix=1)
    out = violin.ops.attention(q, k, v, *tables[:3])
    out = out if tables.after is None else out + tables.after @ v
    torch.testing.assert_close(out, violin.ops.attention(q, k, v), rtol=0, atol=1e-7)
    out.square().sum().backward()
    # Either the decay or what multiplies it can move at the first step, by more than rounding.
    assert max(p.grad.abs().max().item() for p in mask.parameters()) > 1e-4
    if strategy in ("mul_v1", "mul_after_sm", "log"):
        assert mask.rate.grad.abs().max() > 0


def test_rate_below_zero_is_no_decay_and_comes_back():
    mask = violin.ViolinMask(1, "snake", init="identity", grid=(1, 4))
    with torch.no_grad():
        mask.rate.fill_(-2)
    table = mask.mask((1, 4))
    assert torch.equal(table, torch.ones_like(table))
    table.sum().backward()
    assert mask.rate.grad.item() < 0  # more rate, less mask


def test_unit_of_rate_is_the_longest_distance_on_the_own_grid():
    mask = violin.ViolinMask(1, "snake,manhattan", init="identity", grid=(3, 4))
    with torch.no_grad():
        mask.rate.fill_(1)
    torch.testing.assert_close(mask.log_decay().flatten(), torch.tensor([-1 / 11, -1 / 3]))
    mask.set_log_decay(torch.tensor([[-0.5], [-0.25]]))
    torch.testing.assert_close(mask.log_decay().flatten(), torch.tensor([-0.5, -0.25]))
    torch.testing.assert_close(mask.rate_for((6, 8)).flatten(), torch.tensor([0.5 * 47, 0.25 * 7]))


def test_units_of_rates_are_known_without_ranks(monkeypatch):
    grids = [(1, 1), (1, 7), (7, 1), (5, 3), (8, 8)]
    names = [*violin.curves.NAMES, "random:7", "frame:manhattan"]
    device = torch.device("cpu")
    found = {(name, grid): violin.curves.ranks([name], grid).amax().clamp_min(1) for name in names for grid in grids}
    monkeypatch.setattr(violin.curves, "_coordinates", None)
    for name, grid in found:
        assert violin.curves.longest(name, *grid, device) == found[name, grid]
    assert violin.curves.longest("snake,manhattan", 1 << 13, 1 << 13, device).tolist() == [(1 << 26) - 1, (1 << 13) - 1]


def test_heads_without_a_mask_keep_their_attention():
    mask = violin.ViolinMask(4, init="spread", masked_heads=[2, 0], grid=(2, 2))
    gain = mask.tables((2, 2)).gain
    assert mask.alpha.shape == (2,) and gain.shape == (4, 4, 4)
    assert torch.equal(gain[1], torch.ones(4, 4)) and torch.equal(gain[3], torch.ones(4, 4))
    assert gain[0].min() < 1 and gain[2].min() < 1


def test_no_curves_is_alpha_alone():
    mask = violin.ViolinMask(2, curves="", init="finetune")
    gain = mask.tables((2, 2), prefix=1).gain
    assert [name for name, _ in mask.named_parameters()] == ["alpha"]
    torch.testing.assert_close(gain, mask.alpha[:, None, None].expand(2, 5, 5))


def test_tables_are_kept_in_evaluation_until_something_changes():
    mask = violin.ViolinMask(2, init="spread", grid=(3, 3)).eval()
    with torch.no_grad():
        first = mask.tables((3, 3), 1).gain
        assert mask.tables((3, 3), 1).gain is first and mask.kept_tables == 1
        assert mask.tables((2, 5), 1).gain is not first and mask.kept_tables == 2
        mask.alpha.mul_(2)
        assert mask.tables((3, 3), 1).gain[0, 0, 0] == 2
    assert mask.tables((3, 3), 1).gain.requires_grad  # with gradients nothing is kept
    for change in (
        lambda: mask.eval(),
        lambda: mask.train().eval(),
        lambda: mask.to(torch.float64),
        lambda: mask.load_state_dict(mask.state_dict()),
    ):
        with torch.no_grad():
            mask.tables((3, 3), 1)
        assert mask.kept_tables > 0
        change()
        assert mask.kept_tables == 0
    with torch.inference_mode():
        kept = mask.tables((3, 3), 1).gain
    assert not kept.is_inference()


def test_optimisers_that_hide_their_step_do_not_leave_stale_tables():
    mask = violin.ViolinMask(2, init="spread", grid=(3, 3))
    optimiser = torch.optim.AdamW(mask.parameters(), lr=0.1, fused=True)
    mask.eval()
    with torch.no_grad():
        before = mask.tables((3, 3)).gain.clone()
    mask.train()
    mask.tables((3, 3)).gain.sum().backward()
    optimiser.step()
    mask.eval()
    with torch.no_grad():
        assert not torch.equal(mask.tables((3, 3)).gain, before)


def test_tables_that_are_kept_between_a_backward_pass_and_a_hidden_step_are_not_used_after_it():
    mask = violin.ViolinMask(2, init="spread", grid=(3, 3)).eval()
    optimiser = torch.optim.AdamW(mask.parameters(), lr=0.1, fused=True)
    mask.tables((3, 3)).gain.sum().backward()
    with torch.no_grad():
        before = mask.tables((3, 3)).gain.clone()
        versions = [p._version for p in mask.parameters()]
        optimiser.step()
        assert versions == [p._version for p in mask.parameters()]  # or this test tests nothing
        kept = mask.tables((3, 3)).gain
        assert not torch.equal(kept, before) and mask.tables((3, 3)).gain is kept
        mask.requires_grad_(False)  # a teacher: the optimiser of another model is none of its business
        kept = mask.tables((3, 3)).gain
        optimiser.step()
        assert mask.tables((3, 3)).gain is kept


def test_parameters_made_in_inference_mode_can_change():
    with torch.inference_mode():
        mask = violin.ViolinMask(2, init="spread", grid=(3, 3)).eval()
        before = mask.tables((3, 3)).gain
        mask.alpha.mul_(2)
        assert torch.equal(mask.tables((3, 3)).gain, 2 * before) and mask.kept_tables == 0


@pytest.fixture
def capture(monkeypatch):
    """Calls within it are taken for those of which a CUDA graph is made."""

    @contextlib.contextmanager
    def within():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield

    return within


def test_tables_of_a_cuda_graph_are_built_in_it(capture):
    mask = violin.ViolinMask(2, init="spread", grid=(3, 4)).eval()
    with torch.no_grad():
        with capture():
            assert mask.builds((3, 4)) and mask.tables((3, 4)) is not mask.tables((3, 4))
        assert mask.kept_tables == 0
        kept = mask.tables((3, 4))
        with capture():  # whoever drops it does not know the graph
            assert mask.tables((3, 4)) is not kept
        assert mask.tables((3, 4)) is kept
        mask.freeze((3, 4))
        frozen = mask.tables((3, 4))
        with capture():
            assert mask.tables((3, 4)) is frozen


def test_ranks_that_a_cuda_graph_reads_stay_where_they_are(capture):
    def ranks(width):
        return violin.curves.coordinates("snake", 2, width, torch.device("cpu"))

    with capture():
        addresses = {width: ranks(width).data_ptr() for width in (5, 6)}
    for width in range(100, 100 + 2 * violin.curves._KEPT):
        ranks(width)
    read = {key[3]: kept for key, kept in violin.curves._in_graphs.items() if key[:3] == ("ranks", "snake", 2)}
    assert {width: kept.data_ptr() for width, kept in read.items()} == addresses


def test_what_is_kept_on_a_gpu_is_there_before_other_streams_read_it(monkeypatch):
    class Stream:
        device, done = "cuda:0", False

        def synchronize(self):
            self.done = True

    class OnGpu:
        is_cuda, device = True, "cuda:0"

        def __init__(self):
            self.readers = []

        def record_stream(self, stream):
            self.readers.append(stream)

    maker, reader, tensor = Stream(), Stream(), OnGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: maker)
    assert _streams.complete([None, tensor]) is maker and maker.done
    _streams.lend([None, tensor], maker)
    assert not tensor.readers
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: reader)
    _streams.lend([None, tensor], maker)
    assert tensor.readers == [reader]
    assert _streams.complete([None, torch.ones(1)]) is None
    _streams.lend([torch.ones(1)], None)


def test_kept_tables_and_ranks_are_waited_for_once_and_lent_in_each_call(monkeypatch):
    waited, lent, ranks = [], [], torch.zeros(1, 1, 12, dtype=torch.int32)
    monkeypatch.setattr("violin.mask.complete", lambda tensors: waited.append(tensors) or "maker")
    for module in ("mask", "curves"):
        monkeypatch.setattr(f"violin.{module}.lend", lambda tensors, stream: lent.append((tensors, stream)))
    mask = violin.ViolinMask(2, init="spread", grid=(3, 4)).eval()
    with torch.no_grad():
        tables = mask.tables((3, 4))
        assert mask.tables((3, 4)) is tables
    assert len(waited) == 1 and waited[0] is tables
    assert [stream for tensors, stream in lent if tensors is tables] == ["maker"] * 2
    mask.freeze((3, 4))
    assert waited[-1] is mask.tables((3, 4))
    monkeypatch.setitem(violin.curves._MAKERS, "ranks", lambda *key: (ranks, "another"))
    assert violin.curves.coordinates("snake", 3, 4, torch.device("cpu")) is ranks
    assert lent[-1][0][0] is ranks and lent[-1][1] == "another"


def test_table_limit_bounds_what_is_kept():
    mask = violin.ViolinMask(2, init="spread", grid=(3, 3)).eval()
    mask.table_limit = 2 * 9 * 9 * 4
    with torch.no_grad():
        mask.tables((3, 3))
        assert mask.kept_tables == 1
        mask.tables((4, 4))
        assert mask.kept_tables == 0


def test_frozen_tables_are_constants_until_thawed():
    mask = violin.ViolinMask(2, init="spread", grid=(3, 3))
    mask.alpha.requires_grad_(False)
    mask.freeze((3, 3), 1)
    frozen = mask.tables((3, 3), 1).gain
    assert not frozen.requires_grad and not any(p.requires_grad for p in mask.parameters())
    mask.train()
    assert mask.tables((3, 3), 1).gain is frozen
    mask.load_state_dict({name: value + 1 for name, value in mask.state_dict().items()})
    assert not torch.equal(mask.tables((3, 3), 1).gain, frozen)
    mask.to(torch.float64)
    assert mask.tables((3, 3), 1).gain.dtype == torch.float64
    mask.thaw()
    assert not mask.frozen and mask.beta.requires_grad and not mask.alpha.requires_grad


def test_16_bit_parameters_still_make_full_tables():
    mask = violin.ViolinMask(2, init="identity", grid=(32, 32)).half()
    assert mask.units(mask.rate).max() == 1023 and mask.tables((4, 4)).gain.dtype == torch.float32


def test_copies_and_pickles_stand_alone():
    mask = violin.ViolinMask(2, init="spread", grid=(3, 3)).eval()
    with torch.no_grad():
        mask.tables((3, 3))
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.kept_tables == 0
        with torch.no_grad():
            other.alpha.mul_(3)
            torch.testing.assert_close(other.tables((3, 3)).gain, 3 * mask.tables((3, 3)).gain)


def test_pickles_of_an_older_version_bring_no_buffers():
    mask = violin.ViolinMask(3, init="spread", parameterisation="rate", grid=(3, 3), masked_heads=[0, 2])
    mask.register_buffer("_units", mask.units(mask.rate), persistent=False)
    mask.register_buffer("_head_index", torch.tensor([0, 2]), persistent=False)
    other = pickle.loads(pickle.dumps(mask))
    assert not list(other.buffers()) and not other._non_persistent_buffers_set
    assert torch.equal(other.tables((4, 3)).gain, mask.tables((4, 3)).gain)


def test_modules_without_memory_get_it_later():
    mask = violin.ViolinMask(3, "snake", init="spread", masked_heads=[0, 2], parameterisation="rate", device="meta")
    mask.to_empty(device="cpu").reset_parameters()
    same = violin.ViolinMask(3, "snake", init="spread", masked_heads=[0, 2], parameterisation="rate")
    assert torch.equal(mask.tables((3, 3), 1).gain, same.tables((3, 3), 1).gain)


def test_mistakes_name_the_option():
    for options, message in [
        ({"strategy": "mul"}, "unknown masking strategy 'mul'"),
        ({"init": "zero"}, "init is 'zero'"),
        ({"decay": 1.5}, "decay is 1.5"),
        ({"curves": "snake,hilbrt"}, "hilbrt"),
        ({"curves": "", "alpha": False}, "curves are empty"),
        ({"init": "identity", "parameterisation": "sigmoid"}, "parameterisation is 'sigmoid'"),
        ({"init": "identity", "decay": 0.9}, "decay is 0.9"),
        ({"init": "identity", "strategy": "add_v1", "alpha": False}, "alpha is False"),
        ({"masked_heads": [0, 5]}, r"heads are \[0, 5\]; expected numbers from 0 to 1"),
        ({"masked_heads": [0, 0]}, "each once"),
        ({"masked_heads": []}, r"heads is \[\]"),
        ({"prefix_decay": "two"}, "prefix_decay is 'two'"),
        ({"heads": 0}, "heads is 0; expected a whole number from 1 on"),
        ({"heads": 2.5}, "heads is 2.5; expected a whole number"),
        ({"masked_heads": 1}, "heads is 1; expected a list of numbers"),
        ({"masked_heads": "01"}, "heads is '01'; expected a list of numbers"),
        ({"masked_heads": [0.5]}, r"heads is \[0.5\]; expected a list of numbers"),
        ({"curves": None}, "curves is None; expected a set, a name or a list"),
        ({"curves": ["hilbert", 3]}, r"curves is \['hilbert', 3\]; expected a set"),
        ({"decay": "0.5"}, "decay is '0.5'; expected None"),
        ({"decay": True}, "decay is True; expected None"),
        ({"alpha": 0.5}, "alpha is 0.5; expected True or False"),
        ({"grid": (8,)}, r"grid is \(8,\); expected \(height, width\)"),
        ({"grid": (8, 0)}, r"grid is \(8, 0\); expected \(height, width\)"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number"),
        ({"curves": "", "decay": 0.5}, "decay is 0.5; expected None where there is no curve"),
        ({"curves": "", "decay_per_axis": True}, "decay_per_axis is True; expected False where there is no curve"),
        ({"curves": [], "prefix_decay": "learned"}, "prefix_decay is 'learned'; expected 'one' where there is no curve"),
    ]:
        with pytest.raises(violin.Error, match=message):
            violin.ViolinMask(**{"heads": 2, **options})


def test_json_of_a_mask_comes_back():
    for config in (
        violin.MaskConfig(),
        violin.MaskConfig(curves=("hilbert", "snake_T"), init="identity", decay=None, blocks=(1, 0), heads=(2,)),
        violin.MaskConfig(decay=0.996, alpha=False, prefix_decay="learned", strategy="log"),
    ):
        block = json.loads(json.dumps(config.to_json()))
        again = violin.MaskConfig.from_json(block)
        assert again.to_json() == block and again.names == config.names and again.uses_rate == config.uses_rate
    with pytest.raises(violin.Error, match="violin.curve is not a field"):
        violin.MaskConfig.from_json({"curve": "violin"})


def test_fixed_decay_is_a_buffer():
    mask = violin.ViolinMask(2, decay=0.996, alpha=False, grid=(2, 2))
    assert list(mask.state_dict()) == ["gamma"] and not list(mask.parameters())
    assert math.isclose(mask.mask((1, 2))[0, 0, 1].item(), 0.996, rel_tol=1e-6)


def test_kept_tables_see_fused_optimisers_and_swapped_parameters():
    mask = violin.ViolinMask(64, grid=(2, 2), init="spread").eval()
    optimiser = torch.optim.AdamW(mask.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        before = mask.tables((2, 2), 1).gain.clone()
    mask.tables((2, 2), 1).gain.sum().backward()
    optimiser.step()
    with torch.no_grad():
        assert not torch.equal(mask.tables((2, 2), 1).gain, before)
        for i in range(60):  # temporaries, whose addresses come again
            values = {key: value - 0.01 * i for key, value in mask.named_parameters()}
            kept = torch.func.functional_call(mask, values, ((2, 2), 1)).gain
            expected = torch.func.functional_call(mask.train(), values, ((2, 2), 1)).gain
            mask.eval() if i % 2 else setattr(mask, "training", False)
            assert torch.equal(kept, expected), i


def test_mistakes_in_calls_name_the_argument():
    mask, ranks = violin.ViolinMask(2, grid=(4, 4)), violin.curves.ranks("violin", (4, 4))
    for call, message in [
        (lambda: mask.tables((4,)), r"grid is \(4,\); expected \(height, width\)"),
        (lambda: mask.tables((4, 4), "1"), "prefix is '1'; expected a whole number from 0 on"),
        (lambda: mask.freeze(4), r"grid is 4; expected \(height, width\)"),
        (lambda: violin.curves.ranks("hilbert", 8), "grid is 8; expected"),
        (lambda: violin.ops.decay_gain(ranks, mask.log_decay()), "decay_gain: the tensors are on cpu; expected a GPU"),
        (lambda: violin.ops.pack_gain(mask.tables((4, 4)).gain, torch.half), "pack_gain: the tensors are on cpu"),
    ]:
        with pytest.raises(violin.Error, match=message):
            call()
    assert mask.beta.requires_grad and not mask.frozen


def test_parametrised_values_are_seen_and_thawed():
    class Twice(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    mask = violin.ViolinMask(2, grid=(4, 4), init="spread").eval()
    torch.nn.utils.parametrize.register_parametrization(mask, "alpha", Twice())
    with torch.no_grad():
        before = mask.tables((4, 4)).gain
        mask.parametrizations.alpha.original.mul_(5)
        torch.testing.assert_close(mask.tables((4, 4)).gain, 5 * before)
    mask.freeze((4, 4))
    mask.thaw()
    assert mask.parametrizations.alpha.original.requires_grad and not mask.frozen


def test_16_bits_keep_a_fixed_decay():
    mask = violin.ViolinMask(3, decay=0.999, grid=(14, 14), init="spread")
    before = mask.mask((14, 14))
    assert torch.equal(mask.bfloat16().mask((14, 14)), before)
    assert torch.equal(mask.half().float().mask((14, 14)), before)
    assert mask.double().gamma.dtype == torch.float64


def test_constants_of_a_mask_made_in_a_device_context():
    options = {"grid": (4, 4), "init": "spread", "masked_heads": [0, 2]}
    with torch.device("meta"):
        mask = violin.ViolinMask(3, **options)
    source = violin.ViolinMask(3, **options)
    mask.to_empty(device="cpu")
    mask.load_state_dict(source.state_dict())
    assert torch.equal(mask.tables((4, 4)).gain, source.tables((4, 4)).gain)


def test_a_replica_of_data_parallel_passes_gradients_on_in_evaluation():
    """As torch makes replicas: values are attributes there, and parameters() is empty."""
    mask = violin.ViolinMask(2, "hilbert", init="spread", prefix_decay="learned", grid=(3, 3)).eval()
    replica = mask._replicate_for_data_parallel()
    for name, parameter in mask._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.clone())
    assert not list(replica.parameters())
    for one in (mask, replica):
        mask.zero_grad()
        one.tables((3, 3), 1).gain.square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in mask.parameters())
    with torch.no_grad():
        kept = replica.tables((3, 3), 1).gain
        replica.alpha.add_(1)
        assert not torch.equal(replica.tables((3, 3), 1).gain, kept)
