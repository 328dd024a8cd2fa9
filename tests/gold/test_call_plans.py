"""Repeated calls: what is repeated, with which addresses, and what takes the ordinary way.

No GPU is needed: the kernels are functions that read and write memory at the addresses they get.
"""

import ctypes
from itertools import pairwise
from threading import Thread
from types import SimpleNamespace
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from triton import knobs  # noqa: E402

from trapline.gold import bound_launch, call_plans, completion_counters  # noqa: E402
from trapline.gold.bound_launch import Buffer  # noqa: E402
from trapline.gold.call_plans import CallPlans  # noqa: E402
from trapline.gold.device import launched  # noqa: E402

NUMBERS = 4


class FakeLaunch:
    """Does what the kernel does, at the addresses of a later call."""

    def __init__(self, kernel, buffers):
        self.kernel, self.buffers = kernel, buffers

    def __call__(self, addresses, stream):
        assert stream == 7
        self.kernel.compute(*(addresses[number] + offset for number, offset in self.buffers))


def fake_bound(compiled, grid, arguments, buffer_of):
    buffers = [buffer_of(one) for one in arguments.values()]
    return None if None in buffers else FakeLaunch(compiled.kernel, buffers)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    monkeypatch.setattr(call_plans, "_DEVICE", "cpu")
    monkeypatch.setattr(call_plans, "_current_device", lambda: None)  # the index of "cpu"
    monkeypatch.setattr(call_plans, "_current_stream", lambda device: 7)
    monkeypatch.setattr(call_plans, "bound", fake_bound)
    monkeypatch.setattr(call_plans, "ensure_context", lambda device: None)


def memory(address):
    return (ctypes.c_float * NUMBERS).from_address(address)


def kernel_of(compute, *names):
    """A kernel: `kernel.run(*tensors, grid=…)` computes on their memory."""
    kernel = SimpleNamespace(arg_names=names, compute=compute)

    def run(*tensors, grid, **options):
        knobs.runtime.launch_enter_hook(None)
        compute(*(one.data_ptr() for one in tensors))
        return SimpleNamespace(function=1, kernel=kernel)

    kernel.run = run
    return launched(kernel)


def add(left, right, out):
    memory(out)[:] = [a + b for a, b in zip(memory(left), memory(right), strict=True)]


def double(x, out):
    memory(out)[:] = [2 * a for a in memory(x)]


ADD, DOUBLE = kernel_of(add, "left", "right", "out"), kernel_of(double, "x", "out")


class Sums(NamedTuple):
    total: torch.Tensor
    twice: torch.Tensor


class Calls:
    """a + 2b and its double; counts how often the ordinary way is taken."""

    def __init__(self, extra=None):
        self.count, self.extra = 0, extra
        self.plans = CallPlans(self.ordinary)

    def __call__(self, *arguments, **options):
        return self.plans(arguments, options)

    def ordinary(self, a, b, *, scale=1):
        self.count += 1
        scratch = a.new_empty((3, NUMBERS))[1]
        total, twice = torch.empty_like(a), a.new_empty(a.shape)
        DOUBLE.run(b, scratch, grid=(1,))
        ADD.run(a, scratch, total, grid=(1,))
        DOUBLE.run(total, twice, grid=(1,))
        if self.extra:
            self.extra(total)
        return Sums(total, twice)


def drawn():
    return torch.randn(NUMBERS), torch.randn(NUMBERS)


def is_right(found, a, b):
    return torch.equal(found.total, a + 2 * b) and torch.equal(found.twice, 2 * (a + 2 * b))


def test_equal_calls_are_repeated_with_new_tensors():
    calls = Calls()
    for number in range(5):
        a, b = drawn()
        found = calls(a, b)
        assert type(found) is Sums
        assert is_right(found, a, b)
        assert calls.count == min(number + 1, 2)


@pytest.mark.parametrize(
    "changed",
    [
        lambda a, b: (a.double(), b.double()),
        lambda a, b: (torch.stack([a, b], 1)[:, 0], b),
        lambda a, b: (a, b, {"scale": 2}),
        lambda a, b: (a, b, {"scale": True}),
    ],
)
def test_other_dtypes_strides_and_options_are_other_calls(changed):
    calls = Calls()
    for _ in range(4):
        calls(*drawn(), scale=1)
    *given, last = changed(*drawn())
    options = last if isinstance(last, dict) else {"scale": 1}
    calls(*given[:2], *([] if isinstance(last, dict) else [last]), **options)
    assert calls.count == 3


@pytest.mark.parametrize(
    "extra",
    [
        lambda total: total.mul_(1.0),
        lambda total: torch.zeros_like(total),
        lambda total: total.sum().item(),
        lambda total: torch.stack([total, total]),
        lambda total: knobs.runtime.launch_enter_hook(None),
    ],
)
def test_calls_that_do_more_than_allocate_and_launch_are_not_repeated(extra):
    calls = Calls(extra)
    for number in range(4):
        a, b = drawn()
        assert is_right(calls(a, b), a, b)
        assert calls.count == number + 1


def test_one_tensor_given_twice_is_not_recorded():
    calls = Calls()
    a, b = drawn()
    for _ in range(3):
        calls(a, a)
    assert is_right(calls(a, b), a, b)
    assert calls.count == 4
    assert is_right(calls(a, a), a, a)
    assert calls.count == 4


def recorded_calls():
    """One call is made, one recorded, one found by its key and one equal to the last."""
    calls = Calls()
    for _ in range(4):
        calls(*drawn())
    assert calls.count == 2
    return calls


def test_recorded_gradients_take_the_ordinary_way():
    calls = recorded_calls()
    a, b = drawn()
    calls(a.requires_grad_(), b)
    assert calls.count == 3
    with torch.no_grad():
        assert is_right(calls(a, b), a, b)
    assert calls.count == 3


def test_autograd_records_a_call_that_was_known_without_gradients():
    calls = Calls()
    a, b = torch.randn(NUMBERS, requires_grad=True), torch.randn(NUMBERS)
    with torch.no_grad():
        for _ in range(4):
            assert is_right(calls(a, b), a, b)
    assert calls.count == 2
    calls(a, b)
    assert calls.count == 3


def test_arguments_given_by_name_and_by_place_are_other_calls():
    seen = []

    def scaled(x, y=None, *, left=None):
        seen.append((y, left))
        out = torch.empty_like(x)
        DOUBLE.run(x, out, grid=(1,))
        return out

    plans = CallPlans(scaled)
    x = torch.randn(NUMBERS)
    for _ in range(4):
        plans((x,), {"left": 5})
    plans((x, 5), {})
    assert seen == [(None, 5), (None, 5), (5, None)]


def test_unaligned_addresses_take_the_ordinary_way():
    calls = recorded_calls()
    a, b = torch.randn(NUMBERS + 1)[1:], torch.randn(NUMBERS)
    assert is_right(calls(a, b), a, b)
    assert calls.count == 3


def test_modes_transforms_and_hooks_take_the_ordinary_way():
    calls = recorded_calls()
    with FlopCounterMode(display=False):
        calls(*drawn())
    assert calls.count == 3
    hook = knobs.runtime.launch_enter_hook
    hook.add(print)
    calls(*drawn())
    hook.remove(print)
    assert calls.count == 4

    given = drawn()

    def seen(x):
        assert call_plans._transforms()
        calls(*given)
        return x

    torch.vmap(seen)(torch.ones(2))
    assert calls.count == 5


def test_options_that_cannot_be_hashed_reach_the_function():
    calls = recorded_calls()
    calls(*drawn(), scale=[1])
    assert calls.count == 3


def test_plans_are_forgotten_when_there_are_too_many(monkeypatch):
    calls = recorded_calls()
    monkeypatch.setattr(call_plans, "MOST_PLANS", 1)
    calls(*drawn(), scale=2)
    calls(*drawn())
    assert calls.count == 4
    recorded = recorded_calls()
    call_plans.forget_plans()
    recorded(*drawn())
    assert recorded.count == 3


def test_an_argument_that_is_returned_counts_as_written():
    def into(x, *, out):
        DOUBLE.run(x, out, grid=(1,))
        return out

    plans = CallPlans(into)
    out = torch.empty(NUMBERS)
    for _ in range(4):
        x, before = torch.randn(NUMBERS), out._version
        assert plans((x,), {"out": out}) is out
        assert torch.equal(out, 2 * x)
    assert out._version == before + 1


def test_each_repetition_takes_counters_of_its_own(monkeypatch):
    seen = []
    count = kernel_of(lambda _, counters: seen.append(counters), "x", "counters")

    def counting(x):
        out = torch.empty_like(x)
        count.run(x, completion_counters.completion_counters(8, x), grid=(1,))
        return out

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans = CallPlans(counting)
    for _ in range(4):
        plans((torch.randn(NUMBERS),), {})
    assert [b - a for a, b in pairwise(seen)] == [32] * 3


def a_compiled_kernel(**metadata):
    facts = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0}
    facts |= {"profile_scratch_size": 0, "num_warps": 4, "shared": 0, "launch_pdl": True}
    signature = {"x": "*fp32", "n": "i32", "scale": "fp32", "BLOCK": "constexpr"}
    source = SimpleNamespace(signature=signature)
    return SimpleNamespace(metadata=SimpleNamespace(**facts | metadata), src=source, function=1)


@pytest.fixture
def driver(monkeypatch):
    """A driver that keeps what a launch passes to it."""
    seen = []

    def launch(config, function, parameters, extra):
        del function, extra
        config = config._obj
        where = [parameters[i] for i in range(3)]
        x = ctypes.c_uint64.from_address(where[0]).value
        n = ctypes.c_int32.from_address(where[1]).value
        scale = ctypes.c_float.from_address(where[2]).value
        seen.append((*config.grid, config.block[0], config.attribute_count, config.stream))
        seen.append((x, n, scale))
        return 0

    monkeypatch.setattr(bound_launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(bound_launch, "_sizes_in", lambda function: [8, 4, 4, 8, 8])
    return seen


def test_a_bound_launch_passes_addresses_and_numbers(driver):
    arguments = {"x": torch.zeros(1), "n": 5, "scale": 0.5, "BLOCK": 64}
    launch = bound_launch.bound(a_compiled_kernel(), (3, 2), arguments, lambda _: Buffer(1, 16))
    launch([0, 1000], 7)
    assert driver == [(3, 2, 1, 128, 1, 7), (1016, 5, 0.5)]


def test_a_bound_launch_is_as_cooperative_and_as_early_as_the_first():
    def attributes(**facts):
        config = bound_launch._config(a_compiled_kernel(**facts).metadata, (1,))
        return [config.attributes[number].id for number in range(config.attribute_count)]

    assert attributes(launch_pdl=False) == []
    assert attributes(launch_pdl=False, launch_cooperative_grid=True) == [2]
    assert attributes(launch_cooperative_grid=True) == [2, 6]


@pytest.mark.parametrize(
    ("facts", "sizes", "buffer"),
    [
        ({"num_ctas": 2}, [8, 4, 4], Buffer(0, 0)),
        ({"global_scratch_size": 8}, [8, 4, 4], Buffer(0, 0)),
        ({}, [8, 8, 4], Buffer(0, 0)),
        ({}, [8, 4], Buffer(0, 0)),
        ({}, [8, 4, 4, 4], Buffer(0, 0)),
        ({}, [8, 4, 4], None),
    ],
)
def test_launches_that_are_not_understood_are_not_bound(driver, monkeypatch, facts, sizes, buffer):
    monkeypatch.setattr(bound_launch, "_sizes_in", lambda function: sizes)
    arguments = {"x": torch.zeros(1), "n": 5, "scale": 0.5, "BLOCK": 64}
    compiled = a_compiled_kernel(**facts)
    assert bound_launch.bound(compiled, (1,), arguments, lambda _: buffer) is None
    assert not driver


def test_operations_without_tensors_do_not_matter():
    calls = Calls(lambda _: torch.promote_types(torch.float16, torch.float32))
    for _ in range(4):
        calls(*drawn())
    assert calls.count == 2


def test_a_triton_with_other_records_leaves_the_ordinary_way(monkeypatch):
    def unknown(*_):
        raise AttributeError("no such record")

    monkeypatch.setattr(call_plans, "bound", unknown)
    calls = Calls()
    for number in range(4):
        a, b = drawn()
        assert is_right(calls(a, b), a, b)
        assert calls.count == number + 1


@pytest.mark.parametrize("current", [0, 5])
def test_new_threads_get_a_context(monkeypatch, current):
    """Of three launches on a thread the first looks for one, and sets it if there is none."""
    asked = []

    def get_current(context):
        asked.append("get")
        context._obj.value = current

    def get_device(number, device):
        number._obj.value = device

    def retain(context, number):
        context._obj.value = 70 + number.value

    def set_current(context):
        asked.append(context.value)
        return 0

    calls = {"cuCtxGetCurrent": get_current, "cuDeviceGet": get_device}
    calls |= {"cuDevicePrimaryCtxRetain": retain, "cuCtxSetCurrent": set_current}
    monkeypatch.setattr(bound_launch, "_driver", lambda: SimpleNamespace(**calls))

    def work():
        for _ in range(3):
            bound_launch.ensure_context(1)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert asked == (["get"] if current else ["get", 71])


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)])
def test_planning_an_output_takes_no_memory_of_its_size(axes):
    made = torch.empty(8, 16, 32).permute(axes)
    with Allocations() as seen:
        output = call_plans._output(made, [])
    assert max(seen.bytes) <= 4
    assert (output.model is not None) == made.is_contiguous()


class Allocations(TorchDispatchMode):
    """Bytes of the storages that torch makes."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        made = function(*given, **named or {})
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.bytes.append(made.untyped_storage().nbytes())
        return made
