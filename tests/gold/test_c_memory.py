"""Compiled C never writes into memory of another dtype or size, nor into tensors without memory.

Each case runs in a process of its own: a failure would end the process or damage its heap. One
process imports what the cases need and is forked for each of them.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PACKED = """
import torch
from trapline.gold.ternary.packed_linear import packed_linear
x, plane = torch.randn(2, 256), torch.randint(0, 2, (512, 64), dtype=torch.uint8)
scales = torch.rand(512, 2).half()
wanted = packed_linear(x, plane, scales)
"""
CASES = {
    "packed product, default dtype bfloat16": PACKED
    + """
torch.set_default_dtype(torch.bfloat16)
for _ in range(50):
    assert torch.equal(packed_linear(x, plane, scales), wanted)
""",
    "packed product, default dtype float64": PACKED
    + """
torch.set_default_dtype(torch.float64)
found = packed_linear(x, plane, scales)
assert found.dtype == torch.float32 and torch.equal(found, wanted)
""",
    "packed product, default device meta": PACKED
    + """
with torch.device("meta"):
    assert torch.equal(packed_linear(x, plane, scales), wanted)
""",
    "packed product, meta input": PACKED
    + """
from trapline.gold.errors import UnsupportedError
try:
    packed_linear(x.to("meta"), plane, scales)
except UnsupportedError as error:
    assert "move them to one device" in str(error)
else:
    raise SystemExit("not refused")
found = packed_linear(*(one.to("meta") for one in (x, plane, scales)))
assert found.device.type == "meta" and found.shape == wanted.shape
""",
    "packed product, fake tensors": PACKED
    + """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode() as mode:
    fakes = [mode.from_tensor(one) for one in (x, plane, scales)]
    found = packed_linear(*fakes)
    assert found.shape == wanted.shape and found.dtype == torch.float32
assert torch.equal(packed_linear(x, plane, scales), wanted)
""",
    "packed product, refused inputs": """
import torch
from trapline.gold.ternary.cpu.packed_linear import product, unavailable
x, plane, scales = torch.ones(2, 256), torch.ones(8, 64, dtype=torch.uint8), torch.ones(8, 2).half()
for given in [
    (x.double(), plane, scales), (x, plane.char(), scales), (x, plane, scales.float()),
    (x[:, ::2], plane[:, :32], scales[:, :1]), (x, plane[:, :63], scales), (x, plane, scales[:7]),
    (x.to("meta"), plane, scales), (x, plane, scales.to("meta")),
] if unavailable() is None else []:
    try:
        product(*given)
    except (TypeError, ValueError, NotImplementedError):
        continue
    raise SystemExit(f"not refused: {[(one.dtype, one.shape) for one in given]}")
""",
    "few rows, meta, fake and misshapen weights": """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trapline.gold.decoder.cpu.linear_few_rows import linear
x, weight = torch.ones(4, 64), torch.ones(8, 64)
for wrong in (torch.ones(8, 32), torch.ones(8, 128)):
    try:
        linear(x, wrong)
    except (RuntimeError, ValueError):
        continue
    raise SystemExit(f"not refused: {wrong.shape} on {wrong.device}")
assert linear(x.to("meta"), weight.to("meta")).shape == (4, 8)
with FakeTensorMode() as mode:
    assert linear(mode.from_tensor(x), mode.from_tensor(weight)).shape == (4, 8)
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    assert torch.equal(linear(x, weight), torch.full((4, 8), 64.0, device="cpu").float())
""",
    "compiled step, meta and misshapen tensors": """
import torch
from trapline.gold.decoder.config import AttentionRules
from trapline.gold.decoder.cpu import compiled_ops
rules = AttentionRules(None, 0.0, 8**-0.5, None)
if compiled_ops.unavailable() is not None:
    raise SystemExit(0)
x, weight = torch.ones(2, 8), torch.ones(8)
assert not compiled_ops.suits(x.to("meta"), x, weight)
q, pages = torch.ones(2, 4, 8), torch.ones(12, 2, 8)
table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.full((2,), 12, dtype=torch.int32)
calls = [
    lambda: compiled_ops.add_norm(x, x[:, :4], weight, 1e-6),
    lambda: compiled_ops.add_norm(x, x, weight[:7], 1e-6),
    lambda: compiled_ops.add_norm(x, x.to("meta"), weight, 1e-6),
    lambda: compiled_ops.attend(q, (pages, pages[:3]), table, lengths, 4, rules),
    lambda: compiled_ops.attend(q, (pages, pages), table, lengths + 1, 4, rules),
    lambda: compiled_ops.attend(q, (pages, pages), table, lengths[:1], 4, rules),
]
for number, call in enumerate(calls):
    try:
        call()
    except (ValueError, NotImplementedError):
        continue
    raise SystemExit(f"call {number} was not refused")
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    found = compiled_ops.attend(q, (pages, pages), table, lengths, 4, rules)
assert torch.equal(found, q)
""",
    "top-k, misshapen arrays": """
import torch
from trapline.gold.softmax_topk.cpu import topk as native
if native.unavailable() is not None:
    raise SystemExit(0)
logits, one = torch.ones(2, 8), torch.ones(2)
assert native.ranked(logits, 2, one, 1).indices.tolist() == [[0, 1], [0, 1]]
for given in [
    (logits.double(), 2, one), (logits.to("meta"), 2, one), (logits, 9, one), (logits, 0, one),
    (logits, 2, one[:1]), (logits, 2, one.double()), (logits, 2, one.to("meta")),
    (logits, 2, torch.ones(4)[::2]), (logits[:, ::2], 2, one),
]:
    try:
        native.ranked(*given, 1)
    except ValueError:
        continue
    raise SystemExit(f"not refused: {given[1:]}")
""",
    "the demo model, default dtype bfloat16": """
import torch
from trapline.gold import Decoder
from trapline.gold.ternary.demo import demo_model
decoder = Decoder.from_pretrained(demo_model())
ids = torch.tensor([[3, 1, 4, 1, 5]])
with torch.no_grad():
    wanted = decoder(ids)
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        for _ in range(5):
            assert torch.equal(decoder(ids), wanted), dtype
""",
}


#: Runs each case of its input in a child, and prints the exit statuses and what was said.
RUN = """
import json, os, sys, tempfile, traceback
import torch, torch._dynamo, torch._subclasses.fake_tensor
import trapline.gold.decoder, trapline.gold.ternary.packed_linear

def run(source, errors):
    os.dup2(errors.fileno(), 2)
    try:
        exec(source, {"__name__": "__main__"})
    except SystemExit as end:
        print(end.code or "", file=sys.stderr)
        return 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

found = {}
for case, source in json.load(sys.stdin).items():
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            status = run(source, errors)
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        found[case] = [status, errors.read()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes():
    command = [sys.executable, "-W", "error::UserWarning:torch", "-c", RUN]
    given = json.dumps(CASES)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_compiled_code_touches_only_its_own_memory(outcomes, case):
    status, said = outcomes[case]
    assert status == 0, f"exit status {status}: {said[-2000:]}"
